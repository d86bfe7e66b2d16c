#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks every #include and every CMake link against the layer rules of docs/architecture.md.

    check_include_graph.py [ROOT]

Prints one line per violation, `file:line: what is forbidden and why`, and exits 1 if there is any. The rules:

  * RULES, the layer table: which layers the files of a layer may include, and its CMake target may link.
  * A tier of `modules` (base, factory, hybrid) includes itself and lower tiers only.
  * SIMD, CUDA, MPI and NCCL headers appear in kernels, core/device and distributed only, and no header of theirs
    brings one into another layer. Python headers appear in python only.
  * Few files read environment variables: the debug log level, and where files lie.
  * No file includes itself through others.
  * A file below eadem/ that names a type of a header of this repository includes that header, itself or through others,
    or declares the type. In builds that join sources the compiler does not see that it lacks it.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

# A layer, and the layers that it may include besides itself. `engine`, `train` and the edges stand on "models and
# below": everything in the public interfaces of what they use, but neither kernels (for ops and fusions only) nor
# fusions (for pipeline only). A layer that is not in this table is a violation.
MODELS_AND_BELOW = {"core", "ops", "pipeline", "modules", "io", "distributed", "models"}
EDGES_MAY = MODELS_AND_BELOW | {"engine", "train", "convert"}
RULES = {
    "core": set(),
    "kernels": {"core"},
    "ops": {"core", "kernels"},
    "fusions": {"core", "kernels", "ops"},
    "pipeline": {"core", "ops", "fusions"},
    "modules": {"core", "ops", "pipeline"},
    "io": {"core"},
    "models": {"core", "modules", "io"},
    "distributed": {"core"},
    "engine": MODELS_AND_BELOW,
    "train": MODELS_AND_BELOW,
    "convert": MODELS_AND_BELOW | {"engine"},  # It measures what its rounding costs with an engine.
    "cli": EDGES_MAY,
    "server": EDGES_MAY,
    "python": EDGES_MAY,
    "experimental": MODELS_AND_BELOW | {"kernels", "fusions"},  # Anything below engine; nothing may use it.
}

# The tiers of modules, lowest first. Files that belong to no tier (the Module interface) are below them all; the
# header for everyone else, modules.h, and the source that collects the modules of a whole model are above.
TIERS = ["shared", "base", "factory", "hybrid", "whole"]
WHOLE_FILES = {"modules.h", "auto_hardware_config.cc"}  # Its header names no module, so that all may include it.

DEVICE_PLACES = ("eadem/kernels/", "eadem/core/device/", "eadem/distributed/")
# Kind of header, pattern of the included path, places where it may appear.
EXTERNAL = [
    ("SIMD", r"hwy/|.*intrin\.h$|arm_(neon|sve|bf16|fp16)\.h$", DEVICE_PLACES),
    ("CUDA", r"cuda[\w./]*|cu(blas|dnn|rand|sparse|solver|fft)\w*\.h$|cub/|thrust/|cutlass/|cute/|cooperative_groups"
             r"|mma\.h$|nv(rtc|ml|tx\w*)\.h$|nvtx3/|device_launch_parameters\.h$", DEVICE_PLACES),
    ("MPI", r"mpi(-ext)?\.h$|openmpi/", DEVICE_PLACES),
    ("NCCL", r"nccl\w*\.h$", DEVICE_PLACES),
    ("Python", r"Python\.h$|nanobind/|pybind11/|numpy/", ("eadem/python/", "python/")),
]
GETENV_PLACES = ("eadem/core/log.cc", "eadem/cli/interactive/line_editor.cc",
                 "eadem/models/locator/model_locator.cc")
# Passes it on to the processes that it starts; reads which rank a launcher has made this process.
ENVIRONMENT_IS_PASSED_ON = ("eadem/distributed/spawned_ranks.cc", "eadem/distributed/launched_ranks.cc")

SUFFIXES = {".h", ".hh", ".hpp", ".inl", ".inc", ".ipp", ".cc", ".cpp", ".cxx", ".c", ".cu", ".cuh"}
TOKEN = re.compile(
    r"""(?P<comment>//(?:\\\n|[^\n])*|/\*.*?(?:\*/|\Z))
      | (?P<raw>\b(?:u8|u|U|L)?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?(?:\)(?P=delimiter)"|\Z))
      | (?P<number>\.?\d(?:'[\w]|[eEpP][+-]|[\w.])*)
      | (?P<string>"(?:\\.|[^"\\\n])*")
      | (?P<char>'(?:\\.|[^'\\\n])+')
      | (?P<word>[A-Za-z_]\w*)""",
    re.VERBOSE | re.DOTALL,
)
# A type that is defined outside of other types, which is why its line is not indented.
DEFINED = re.compile(r"^(?:struct|class|enum class|enum)\s+([A-Z]\w*)(?:\s+final)?\s*[:{]|^using\s+([A-Z]\w*)\s*=", re.MULTILINE)
# A type, a parameter of a template or an alias, wherever it is declared.
DECLARED = re.compile(r"\b(?:struct|class|enum\s+class|enum|union|concept|typename|using)\s+([A-Z]\w*)")
# A declaration without a definition.
ANNOUNCED = re.compile(r"^\s*(?:struct|class|enum class)\s+([A-Z]\w*)(?:\s*:\s*\w+)?;", re.MULTILINE)
# A word that can be the name of a type, unless it is a member.
NAMED = re.compile(r"(?<![\w.>])([A-Z]\w*)")
INCLUDE = re.compile(r"^[ \t]*#[ \t]*(?:include|include_next|import)\b[ \t]*(.*?)[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Include:
    line: int
    text: str  # What stands after #include.
    path: str  # "" for a computed include
    target: str  # The file of this repository that it names, or ""


def blank(text):
    return re.sub(r"[^\n]", " ", text)


def without_comments(text, strings):
    """`text` with comments, and if `strings` is false also the contents of literals, blanked; lines keep their place.

    Raw strings are blanked always: an #include at the start of a line of one is text.
    """

    def replace(match):
        if match["comment"] is not None or match["raw"] is not None:
            return blank(match[0])
        if not strings and (match["string"] is not None or match["char"] is not None):
            return blank(match[0])
        return match[0]

    return TOKEN.sub(replace, text)


def includes_of(root, file, text):
    found = []
    for match in INCLUDE.finditer(without_comments(text, strings=True)):
        written = re.match(r'"([^"]+)"|<([^>]+)>', match[1])
        path = (written[1] or written[2]) if written else ""
        target = ""
        if path:
            beside = ((root / file).parent / path).resolve()
            if path.startswith(("eadem/", "tests/", "benchmarks/", "examples/", "python/")):
                target = path
            elif written[1] and beside.is_file() and beside.is_relative_to(root):
                target = beside.relative_to(root).as_posix()
        found.append(Include(text.count("\n", 0, match.start()) + 1, match[1], path, target))
    return found


def layer_of(file):
    """The layer of a file below eadem/ or python/; None for tests, benchmarks and examples."""
    parts = file.split("/")
    if parts[0] == "python":
        return "python"
    if parts[0] == "eadem":
        return parts[1] if len(parts) > 2 else "(none)"
    return None


def tier_of(file):
    parts = file.split("/")[2:]
    name = parts[0].removesuffix(".h").removesuffix(".cc")
    if name in ("base", "factory", "hybrid"):
        return name
    return "whole" if parts[0] in WHOLE_FILES else "shared"


def external_kinds(path):
    return [(kind, places) for kind, pattern, places in EXTERNAL if re.match(pattern, path)]


def users_of(layer):
    users = sorted(user for user, may in RULES.items() if layer in may)
    return f"{layer} may be used by {', '.join(users)} only" if users else f"nothing may use {layer}"


def edge_violation(source, target):
    """Why layer `source` may not use layer `target`, or None."""
    if source == target or target in RULES.get(source, set()):
        return None
    if target not in RULES:
        return f"'{target}' is not a layer; the rule table of this test lists them"
    may = ", ".join(sorted(RULES[source])) or "nothing"
    return f"{source} -> {target} is forbidden: {source} may use {may}; {users_of(target)}"


class Checker:
    def __init__(self, root):
        self.root = Path(root).resolve()
        self.violations = []
        self.graph = {}  # file -> [Include]
        self.code = {}  # file -> text without comments and literals

    def report(self, file, line, text):
        self.violations.append((file, line, text))

    def read(self):
        for folder in ("eadem", "python", "tests", "benchmarks", "examples"):
            for path in sorted((self.root / folder).rglob("*")):
                if path.suffix not in SUFFIXES or not path.is_file():
                    continue
                file = path.relative_to(self.root).as_posix()
                text = path.read_text(encoding="utf-8", errors="replace")
                self.graph[file] = includes_of(self.root, file, text)
                self.code[file] = without_comments(text, strings=False)

    def check_layers(self):
        for file, includes in self.graph.items():
            source = layer_of(file)
            if source is not None and source not in RULES:
                self.report(file, 1, f"layer '{source}' is not in the rule table of this test")
                continue
            for include in includes:
                self.check_include(file, source, include)

    def check_include(self, file, source, include):
        target = layer_of(include.target) if include.target else None
        if source is None:  # Tests, benchmarks and examples may see everything but ideas under trial.
            if target == "experimental" and not file.startswith("tests/experimental/"):
                self.report(file, include.line, f"{file.split('/')[0]} -> experimental is forbidden: only "
                            f"tests/experimental may include it ({include.text})")
            return
        if not include.path:
            if not file.startswith("eadem/kernels/"):
                self.report(file, include.line, f"computed include {include.text} cannot be checked")
            return
        if include.target and target is None:
            self.report(file, include.line, f"{source} -> {include.target.split('/')[0]} is forbidden: the engine "
                        f"includes no test, benchmark or example ({include.text})")
        elif target is not None:
            reason = edge_violation(source, target)
            if reason is not None:
                self.report(file, include.line, f"{reason} ({include.text})")
            elif source == target == "modules":
                self.check_tier(file, include)
        for kind, places in external_kinds(include.path):
            if not include.target and not file.startswith(places):
                self.report(file, include.line, f"{kind} header {include.text} in {source}: such headers appear in "
                            f"{', '.join(places)} only")

    def check_tier(self, file, include):
        source, target = tier_of(file), tier_of(include.target)
        if TIERS.index(target) > TIERS.index(source):
            self.report(file, include.line, f"modules/{source} -> modules/{target} is forbidden: a tier includes itself "
                        f"and lower ones ({' < '.join(TIERS)}) ({include.text})")

    def check_leaks(self):
        """A header of kernels, core/device or distributed that others include must not bring device headers along."""
        brings = {}  # file -> {kind: path of the external header}

        def collect(file):
            if file not in brings:
                brings[file] = {}  # Ends the recursion in a cycle, which check_cycles reports.
                for include in self.graph.get(file, []):
                    if include.target:
                        brings[file].update(collect(include.target))
                    else:
                        brings[file].update((kind, include.path) for kind, _ in external_kinds(include.path))
            return brings[file]

        for file, includes in self.graph.items():
            if layer_of(file) is None:
                continue
            for include in includes:
                for kind, path in collect(include.target).items() if include.target else ():
                    places = next(places for name, _, places in EXTERNAL if name == kind)
                    if not file.startswith(places) and include.target.startswith(places):
                        self.report(file, include.line, f"{include.target} brings the {kind} header <{path}> into "
                                    f"{layer_of(file)}: such headers appear in {', '.join(places)} only")

    def check_environment(self):
        pattern = re.compile(r"\b(?:secure_getenv|getenv|setenv|putenv|unsetenv|environ)\b")
        for file, code in self.code.items():
            if layer_of(file) is None or file in GETENV_PLACES + ENVIRONMENT_IS_PASSED_ON:
                continue
            self.report_environment(file, code, pattern)
        for path in sorted((self.root / "python").rglob("*.py")):
            text = re.sub(r"#.*", "", path.read_text(encoding="utf-8"))
            self.report_environment(path.relative_to(self.root).as_posix(), text, re.compile(r"\bos\.(?:environ|getenv)\b"))

    def report_environment(self, file, code, pattern):
        for match in pattern.finditer(code):
            self.report(file, code.count("\n", 0, match.start()) + 1,
                        f"{match[0]}: nothing is configured by environment variables (but the debug log level and where a user's state and models lie, in "
                        f"{', '.join(GETENV_PLACES)})")

    def check_cycles(self):
        state = {}  # file -> "open" while on the path, then "done"
        reported = set()
        for start in self.graph:
            if start in state:
                continue
            stack = [(start, iter(self.graph[start]))]  # The path from `start`, with the includes not yet taken.
            state[start] = "open"
            while stack:
                file, rest = stack[-1]
                include = next((i for i in rest if i.target in self.graph), None)
                if include is None:
                    state[file] = "done"
                    stack.pop()
                elif state.get(include.target) == "open":
                    files = [f for f, _ in stack]
                    cycle = files[files.index(include.target):]
                    if frozenset(cycle) not in reported:
                        reported.add(frozenset(cycle))
                        self.report(file, include.line, "include cycle: " + " -> ".join(cycle + [include.target]))
                elif include.target not in state:
                    state[include.target] = "open"
                    stack.append((include.target, iter(self.graph[include.target])))

    def check_names(self):
        """A type has to have one definition, and no other type its name. Other names are left to the compiler."""
        ours = {file: code for file, code in self.code.items() if file.startswith("eadem/")}
        announced = {file: set(ANNOUNCED.findall(code)) for file, code in ours.items()}
        defined, declared = {}, {}
        for file, code in ours.items():
            for match in DEFINED.finditer(code) if file.endswith((".h", ".cuh")) else ():
                defined.setdefault(match[1] or match[2], set()).add(file)
            for name in DECLARED.findall(code):
                if name not in announced[file]:
                    declared.setdefault(name, set()).add(file)
        home = {name: next(iter(files)) for name, files in defined.items()
                if len(files) == 1 and declared.get(name, files) == files}
        backend_of = lambda file: next((b for b in ("cpu", "cuda") if file.startswith(f"eadem/kernels/{b}/")), None)
        for file, code in ours.items():
            included = None
            for match in NAMED.finditer(code):
                target = home.get(match[1])
                if target in (None, file) or {backend_of(file), backend_of(target)} == {"cpu", "cuda"}:
                    continue  # A backend's file that has the name of another backend's type means something else.
                included = included or self.included_by(file)
                if target not in included and not any(match[1] in announced.get(f, ()) for f in included):
                    self.report(file, code.count("\n", 0, match.start()) + 1,
                                f"{match[1]} is defined in {target}, which this file does not include")

    def included_by(self, file):
        """`file` and what it includes, itself or through others."""
        found, rest = set(), [file]
        while rest:
            if (last := rest.pop()) not in found:
                found.add(last)
                rest += [include.target for include in self.graph.get(last, ()) if include.target]
        return found

    def check_links(self):
        """What a layer's CMake files link is held to the same table."""
        for path in sorted((self.root / "eadem").rglob("*")):
            if path.name != "CMakeLists.txt" and path.suffix != ".cmake":
                continue
            file = path.relative_to(self.root).as_posix()
            source = layer_of(file)
            if source not in RULES:
                continue
            for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                for target in re.findall(r"\beadem(?:::|_)(\w+)", text.split("#")[0]):
                    reason = edge_violation(source, target) if target in RULES else None
                    if reason is not None:
                        self.report(file, line, f"link: {reason}")

    def run(self):
        self.read()
        self.check_layers()
        self.check_leaks()
        self.check_environment()
        self.check_cycles()
        self.check_names()
        self.check_links()
        return [f"{file}:{line}: {text}" for file, line, text in sorted(set(self.violations))]


def main(arguments):
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[2]
    checker = Checker(root)
    violations = checker.run()
    if not any(file.startswith("eadem/") for file in checker.graph):
        print(f"{root}: no source below eadem/; is this the repository's root?", file=sys.stderr)
        return 2
    for violation in violations:
        print(violation)
    edges = sum(len(includes) for includes in checker.graph.values())
    print(f"include graph: {len(checker.graph)} files, {edges} includes, {len(violations)} violations", file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
