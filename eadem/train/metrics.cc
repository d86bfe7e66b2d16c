// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/metrics.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "eadem/core/error.h"
#include "eadem/io/files/atomic_file.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/json.h"

namespace eadem::train {

namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 32;  // 20 million steps

std::string line_of(const StepMetrics& m) {
  io::JsonValue json = io::JsonValue::object();
  json.set("step", m.step).set("loss", m.loss).set("learning_rate", m.learning_rate).set("grad_norm", m.grad_norm);
  json.set("tokens", m.tokens).set("tokens_per_second", m.tokens_per_second);
  if (m.load_balancing_loss) json.set("load_balancing_loss", *m.load_balancing_loss);
  return io::to_compact_json(json);
}

std::string line_of(const EvalMetrics& m) {
  io::JsonValue json = io::JsonValue::object();
  const double perplexity = std::exp(m.loss);
  json.set("step", m.step).set("eval_loss", m.loss);
  json.set("eval_perplexity", std::isfinite(perplexity) ? io::JsonValue(perplexity) : io::JsonValue());
  return io::to_compact_json(json);
}

// The area of the plot in pixels, and the scales that map values into it.
struct Frame {
  static constexpr double kWidth = 720, kHeight = 400, kLeft = 60, kRight = 20, kTop = 40, kBottom = 45;
  double min_x = 0, max_x = 1, min_y = 0, max_y = 1;

  double x(double value) const { return kLeft + (value - min_x) / (max_x - min_x) * (kWidth - kLeft - kRight); }
  double y(double value) const { return kTop + (max_y - value) / (max_y - min_y) * (kHeight - kTop - kBottom); }
};

// 1, 2 or 5 times a power of ten: about `count` ticks over `range`.
double tick_step(double range, int count) {
  const double raw = range / count, power = std::pow(10, std::floor(std::log10(raw)));
  for (double factor : {1.0, 2.0, 5.0})
    if (factor * power >= raw) return factor * power;
  return 10 * power;
}

void draw_axes(std::ostringstream& svg, const Frame& frame, const std::string& title) {
  svg << fmt::format(
             R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" font-family="sans-serif" font-size="12">)",
             Frame::kWidth, Frame::kHeight)
      << "\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
      << fmt::format(R"(<text x="{}" y="22" font-size="15">{}</text>)", Frame::kLeft, title) << "\n";
  for (double v =
           std::ceil(frame.min_y / tick_step(frame.max_y - frame.min_y, 6)) * tick_step(frame.max_y - frame.min_y, 6);
       v <= frame.max_y; v += tick_step(frame.max_y - frame.min_y, 6))
    svg << fmt::format(
               R"(<path d="M{} {:.1f}H{}" stroke="#ddd"/><text x="{}" y="{:.1f}" text-anchor="end">{:.4g}</text>)",
               Frame::kLeft, frame.y(v), Frame::kWidth - Frame::kRight, Frame::kLeft - 6, frame.y(v) + 4, v)
        << "\n";
  for (double v = 0; v <= frame.max_x; v += tick_step(frame.max_x, 8))
    svg << fmt::format(R"(<text x="{:.1f}" y="{}" text-anchor="middle">{:.6g}</text>)", frame.x(v),
                       Frame::kHeight - Frame::kBottom + 18, v)
        << "\n";
  svg << fmt::format(R"(<text x="{}" y="{}" text-anchor="middle">step</text>)", Frame::kWidth / 2, Frame::kHeight - 8)
      << "\n";
}

void draw_line(std::ostringstream& svg, const Frame& frame, const std::vector<std::pair<double, double>>& points,
               const char* color) {
  if (points.empty()) return;
  svg << "<path fill=\"none\" stroke=\"" << color << "\" stroke-width=\"1.5\" d=\"";
  for (size_t i = 0; i < points.size(); ++i)
    svg << fmt::format("{}{:.1f} {:.1f}", i == 0 ? "M" : "L", frame.x(points[i].first),
                       frame.y(std::clamp(points[i].second, frame.min_y, frame.max_y)));
  svg << "\"/>\n";
}

}  // namespace

Metrics::Metrics(const std::string& path, int64_t last_step) : path_(path) {
  std::string kept;
  if (std::filesystem::exists(path)) {
    std::istringstream existing(io::read_file(path, kMaxBytes));
    for (std::string line; std::getline(existing, line);) {
      try {
        const io::JsonReader json = io::JsonReader::parse(line, path);
        const int64_t step = json.integer("step", 0);
        const bool eval = json.has("eval_loss");
        const int64_t before =
            eval ? (evals_.empty() ? 0 : evals_.back().step) : (steps_.empty() ? 0 : steps_.back().step);
        if (step > last_step || step <= before) continue;
        if (eval)
          evals_.push_back({step, json.number("eval_loss")});
        else
          steps_.push_back({step, json.number("loss"), json.number("learning_rate"), json.number("grad_norm"),
                            json.integer("tokens", 0), json.number("tokens_per_second"),
                            json.optional_number("load_balancing_loss")});
        kept += line + "\n";
      } catch (const DataCorrupted&) {
        break;  // a crash cut this line off, and nothing follows it
      }
    }
  }
  io::write_file_atomically(path, kept);
  file_.open(path, std::ios::app);
  if (!file_) throw IoError("cannot append to '{}': {}", path, std::strerror(errno));
}

void Metrics::append(const std::string& line) {
  file_ << line << '\n' << std::flush;
  if (!file_) throw IoError("cannot write to '{}': {}", path_, std::strerror(errno));
}

void Metrics::add(const StepMetrics& metrics) {
  steps_.push_back(metrics);
  append(line_of(metrics));
}

void Metrics::add(const EvalMetrics& metrics) {
  evals_.push_back(metrics);
  append(line_of(metrics));
}

std::string plot_svg(const Metrics& metrics, const std::string& title) {
  std::vector<std::pair<double, double>> train, eval;
  double smooth = 0, weight = 0;
  for (const StepMetrics& m : metrics.steps()) {
    smooth = 0.95 * smooth + 0.05 * m.loss;  // exponential mean, corrected for its start
    weight = 0.95 * weight + 0.05;
    train.emplace_back(m.step, smooth / weight);
  }
  for (const EvalMetrics& m : metrics.evals()) eval.emplace_back(m.step, m.loss);

  Frame frame;
  frame.min_y = 1e30;
  frame.max_y = -1e30;
  for (const auto* points : {&train, &eval})
    for (const auto& [x, y] : *points) {
      frame.max_x = std::max(frame.max_x, x);
      frame.min_y = std::min(frame.min_y, y);
      frame.max_y = std::max(frame.max_y, y);
    }
  if (frame.min_y > frame.max_y) frame.min_y = 0, frame.max_y = 1;
  const double margin = 0.05 * (frame.max_y - frame.min_y) + 1e-3;
  frame.min_y -= margin;
  frame.max_y += margin;

  std::ostringstream svg;
  draw_axes(svg, frame, title);
  draw_line(svg, frame, train, "#1f77b4");
  draw_line(svg, frame, eval, "#d62728");
  const double legend = Frame::kWidth - 200;
  svg << fmt::format(R"(<text x="{}" y="60" fill="#1f77b4">training loss (smoothed)</text>)", legend) << "\n";
  if (!eval.empty())
    svg << fmt::format(R"(<text x="{}" y="78" fill="#d62728">held-out loss, last {:.3f}</text>)", legend,
                       eval.back().second)
        << "\n";
  svg << "</svg>\n";
  return svg.str();
}

}  // namespace eadem::train
