# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch on a GPU as a strong user would run a dense Llama: bf16, torch.compile, a static cache, CUDA graphs.

    torch_llama.py CONFIG [--prompt 1024] [--batch 1,32] [--depth 512] [--tokens 64] [--attention]
    torch_llama.py CONFIG --train BATCH,SEQUENCE

CONFIG is a config.json; weights are random. Prints one line of JSON for a prompt, one for each batch of decode, and with
--attention one each for cuDNN's and FlashAttention's causal attention of 16 heads of 128 and 16,384 tokens, forward
and backward. With --train, one for training steps: masters in f32, products in bf16 (autocast), the fused AdamW. Needs
PyTorch 2.5 or newer and an NVIDIA GPU, and nothing else.
"""

import argparse
import json
import statistics
import time

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.dim = c.get("head_dim") or hidden // self.heads
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=c["rms_norm_eps"]) for _ in range(2))

    def forward(self, x, cos, sin, cache, positions, mask):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).split(
            [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim], -1)
        q, k, v = (t.view(batch, tokens, -1, self.dim).transpose(1, 2) for t in (q, k, v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if cache is not None:
            cache[0].index_copy_(2, positions, k)
            cache[1].index_copy_(2, positions, v)
        if mask is None:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            y = y.transpose(1, 2)
        else:  # one token; keys are not repeated for the heads that share them
            scores = q.reshape(batch, self.kv_heads, -1, self.dim) @ cache[0].transpose(2, 3) * self.dim**-0.5
            y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ cache[1]
        x = x + self.out(y.reshape(batch, tokens, -1))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedding = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        self.head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        if c.get("tie_word_embeddings"):
            self.head.weight = self.embedding.weight
        dim = self.layers[0].dim
        inverse = float(c.get("rope_theta", 10000.0)) ** (-torch.arange(0, dim, 2, device="cuda").float() / dim)
        angles = torch.arange(16384, device="cuda").float()[:, None] * inverse
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())

    def forward(self, tokens, caches, positions, length):
        """tokens [batch, n] at `positions` [n]; length: of the caches for decode, 0 for a prompt."""
        x = self.embedding(tokens)
        cos, sin = self.cos[positions], self.sin[positions]
        mask = torch.arange(length, device="cuda")[None, :] <= positions[:, None] if length > 0 else None
        for layer, cache in zip(self.layers, caches):
            x = layer(x, cos, sin, cache, positions, mask)
        return self.head(self.norm(x[:, -1])).argmax(-1, keepdim=True)

    def loss(self, tokens):
        x = self.embedding(tokens)
        positions = torch.arange(tokens.shape[1], device="cuda")
        for layer in self.layers:
            x = layer(x, self.cos[positions], self.sin[positions], None, positions, None)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits.float(), tokens[:, 1:].flatten())


def seconds_of(run, repeat=5):
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_attention():
    q, k, v, dy = (torch.randn(1, 16, 16384, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for each in (q, k, v):
        each.requires_grad_()
    flops = 4 * 16384 * 16385 / 2 * 16 * 128
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            def forward():
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

            y = forward()
            y.backward(dy, retain_graph=True)
            ahead = seconds_of(lambda: [forward() for _ in range(10)]) / 10
            back = seconds_of(lambda: [y.backward(dy, retain_graph=True) for _ in range(10)]) / 10
        print(json.dumps({"attention": backend.name, "forward_tflops": round(flops / ahead / 1e12, 1),
                          "backward_tflops": round(2.5 * flops / back / 1e12, 1)}), flush=True)


def time_training(c, about, batch, sequence):
    with torch.device("cuda"):
        model = Model(c)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    tokens = torch.randint(c["vocab_size"], (batch, sequence), device="cuda")
    loss_of = torch.compile(model.loss)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    seconds = seconds_of(step)
    print(json.dumps({**about, "train": [batch, sequence], "tokens_per_second": round(batch * sequence / seconds)}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--depth", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--train")
    arguments = parser.parse_args()
    with open(arguments.config, encoding="utf-8") as file:
        c = json.load(file)
    about = {"config": arguments.config, "torch": torch.__version__, "device": torch.cuda.get_device_name()}
    if arguments.train:
        return time_training(c, about, *map(int, arguments.train.split(",")))
    if arguments.attention:
        time_attention()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Model(c)
    layer = model.layers[0]

    def caches_for(batch, length):
        shape = (2, batch, layer.kv_heads, length, layer.dim)
        return [torch.zeros(shape, device="cuda") for _ in model.layers]

    with torch.inference_mode():
        prompt = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        tokens = torch.randint(c["vocab_size"], (1, arguments.prompt), device="cuda")
        caches, positions = caches_for(1, arguments.prompt), torch.arange(arguments.prompt, device="cuda")
        for _ in range(4):
            prompt(tokens, caches, positions, 0)
        seconds = seconds_of(lambda: prompt(tokens, caches, positions, 0))
        print(json.dumps({**about, "prompt": arguments.prompt, "tokens_per_second": round(arguments.prompt / seconds)}),
              flush=True)
        for batch in map(int, arguments.batch.split(",")):
            length = 2 * arguments.depth
            caches = caches_for(batch, length)
            token = torch.randint(c["vocab_size"], (batch, 1), device="cuda")
            position = torch.full((1,), arguments.depth, device="cuda")

            step = torch.compile(model, fullgraph=True)
            for _ in range(3):
                step(token, caches, position, length)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                token.copy_(step(token, caches, position, length))
                position.add_(1)

            def decode(count):
                position.fill_(arguments.depth)
                for _ in range(count):
                    graph.replay()

            decode(6)
            seconds = seconds_of(lambda: decode(arguments.tokens))
            print(json.dumps({**about, "batch": batch, "depth": arguments.depth,
                              "tokens_per_second": round(batch * arguments.tokens / seconds, 1)}), flush=True)


if __name__ == "__main__":
    main()
