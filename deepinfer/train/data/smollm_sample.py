"""Sample English text from SmolLM2-135M-Instruct (Apache-2.0) on one GPU.

A compact Llama decoder in plain PyTorch. Rows are refilled as soon as they finish: every row owns a ring of
`WINDOW` cache slots, all rows share one global position (RoPE is relative, so a row may start anywhere) and a mask
hides the slots older than the row's start. Every step has the same shapes, and there is no padding. At 4096 rows
a step keeps the device busy for longer than its launches take, so no CUDA graph is needed.

    python -m deepinfer.train.data.smollm_sample --gguf MODEL.gguf --out DIR --seconds 200
"""

import argparse
import json
import lzma
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGUFReader, dequantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deepinfer.train.data.prompts import make_prompt

WINDOW = 512  # cache slots per row = longest prompt + answer, in tokens
MAX_PROMPT = 96
END = 2  # <|im_end|>, SmolLM2's end of turn
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64


def build_tokenizer(reader: GGUFReader) -> Tokenizer:
    """The SmolLM2 tokenizer (byte-level BPE, single digits) from GGUF metadata."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, kinds, strict=True) if kind == 3])
    return tokenizer


def load_weights(reader: GGUFReader, device: str) -> dict[str, torch.Tensor]:
    """Dequantise every tensor to bf16 (norms too); q and k rows go back from adjacent-pair to half-split RoPE order."""
    weights = {}
    for t in reader.tensors:
        w = torch.from_numpy(dequantize(t.data, t.tensor_type).astype(np.float32))
        if t.name.endswith(("attn_q.weight", "attn_k.weight")):
            w = w.view(-1, HEAD_DIM // 2, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)
        weights[t.name] = w.to(device, torch.bfloat16)
    return weights


@dataclass
class State:
    """Everything a decode step reads and writes, all on the device: a step never waits for the host.

    token, start, prompt_id: int64 [B]; pos, next_prompt: int64 []; log: int32 [steps, B];
    ring: int64 [B, WINDOW], the row's own last tokens (0 elsewhere);
    k, v: bf16 [layers, B, kv_heads, WINDOW, head_dim].
    """

    token: torch.Tensor
    start: torch.Tensor
    prompt_id: torch.Tensor
    pos: torch.Tensor
    next_prompt: torch.Tensor
    log: torch.Tensor
    ring: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, 1e-5)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split RoPE in float32. x: [B, heads, head_dim], cos/sin: [head_dim / 2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def attend_matmul(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(2, 3)) + mask, -1), v)


def attend_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The query heads of one kv head are its query rows: q [B, kv_heads, group, 64], k and v [.., WINDOW, 64]."""
    mask = mask.expand(-1, q.shape[1], q.shape[2], -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def forward(w: dict[str, torch.Tensor], s: State, freqs: torch.Tensor, attend: Attend) -> torch.Tensor:
    """One token for every row: logits bf16 [B, vocab]; writes this position's keys and values."""
    batch = s.token.shape[0]
    slot = (s.pos % WINDOW).view(1)
    slots = torch.arange(WINDOW, device=s.token.device)
    age = (s.pos - slots) % WINDOW  # how many steps ago each slot was written
    hidden_slots = age[None] > (s.pos - s.start)[:, None]
    mask = torch.zeros_like(hidden_slots, dtype=torch.bfloat16).masked_fill(hidden_slots, -1e4)[:, None, None]
    angle = s.pos.double() * freqs
    cos, sin = angle.cos().float(), angle.sin().float()
    x = w["token_embd.weight"][s.token]
    for i in range(LAYERS):
        p = f"blk.{i}."
        h = rms_norm(x, w[p + "attn_norm.weight"])
        q, k, v = (F.linear(h, w[p + f"attn_{n}.weight"]).view(batch, -1, HEAD_DIM) for n in "qkv")
        s.k[i].index_copy_(2, slot, rotate(k, cos, sin).unsqueeze(2))
        s.v[i].index_copy_(2, slot, v.unsqueeze(2))
        q = rotate(q, cos, sin).view(batch, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM) * HEAD_DIM**-0.5
        out = attend(q, s.k[i], s.v[i], mask)
        x = x + F.linear(out.reshape(batch, -1), w[p + "attn_output.weight"])
        h = rms_norm(x, w[p + "ffn_norm.weight"])
        h = F.silu(F.linear(h, w[p + "ffn_gate.weight"])) * F.linear(h, w[p + "ffn_up.weight"])
        x = x + F.linear(h, w[p + "ffn_down.weight"])
    return F.linear(rms_norm(x, w["output_norm.weight"]), w["token_embd.weight"])


def sample(logits: torch.Tensor, temperature: float, min_p: float) -> torch.Tensor:
    """Min-p sampling by the exponential race (Gumbel-max); min-p needs no sort, unlike top-k."""
    logits = logits / temperature
    floor = logits.amax(-1, keepdim=True) + float(np.log(min_p))
    noise = torch.empty_like(logits).exponential_().log_()
    return (logits - noise).masked_fill_(logits < floor, -torch.inf).argmax(-1)


def penalise_repeats(logits: torch.Tensor, s: State) -> torch.Tensor:
    """Lower every token that would repeat a 4-gram (by 1.5 per earlier copy) or a 5-gram (by 1.5 more) of its row.

    The idea of the DRY sampler: a small model loops, and this stops loops without touching single-word frequencies.
    """
    now = s.pos % WINDOW
    last = [s.ring.index_select(1, ((s.pos - n) % WINDOW).view(1)) for n in range(4)]
    matches = [s.ring.roll(n, 1) == last[n] for n in range(4)]
    three = matches[0] & matches[1] & matches[2] & (s.ring != 0)
    # The current slot always matches itself, but its follower is the oldest slot, not a continuation.
    three &= torch.arange(WINDOW, device=logits.device) != now
    amount = three * 1.5 + (three & matches[3]) * 1.5
    return logits.float().scatter_add_(1, s.ring.roll(-1, 1), -amount)


def step(
    w: dict[str, torch.Tensor],
    s: State,
    freqs: torch.Tensor,
    attend: Attend,
    prompts: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Decode one position of every row in place: follow the prompt, else sample, else refill a finished row.

    The log holds the token fed at each position, or -(prompt_id + 1) where a row starts a new prompt.
    """
    offset = s.pos - s.start
    s.log.index_copy_(0, s.pos.view(1), torch.where(offset == 0, -s.prompt_id - 1, s.token).int()[None])
    s.ring.index_copy_(1, (s.pos % WINDOW).view(1), s.token.unsqueeze(1))
    token = sample(penalise_repeats(forward(w, s, freqs, attend), s), 0.75, 0.08)
    forced = offset + 1 < lengths[s.prompt_id]
    token = torch.where(forced, prompts[s.prompt_id, (offset + 1).clamp_max(MAX_PROMPT - 1)], token)
    done = (~forced & (token == END)) | (offset + 2 > WINDOW)
    fresh = s.next_prompt + done.cumsum(0) - 1
    s.prompt_id.copy_(torch.where(done, fresh % len(lengths), s.prompt_id))
    s.next_prompt.add_(done.sum())
    s.start.copy_(torch.where(done, s.pos + 1, s.start))
    s.ring.mul_(~done.unsqueeze(1))
    s.token.copy_(torch.where(done, prompts[s.prompt_id, 0], token))
    s.pos.add_(1)


def encode_prompts(tokenizer: Tokenizer, seed: int, count: int) -> tuple[list[tuple[str, str]], np.ndarray, np.ndarray]:
    """Render `count` seeded prompts in SmolLM2's chat format; over-long ones are dropped. Arrays: [N, 96] and [N]."""
    pairs = [make_prompt(seed, i) for i in range(count)]
    texts = [
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{p}<|im_end|>\n"
        f"<|im_start|>assistant\n{opening}"
        for p, opening in pairs
    ]
    rows = [e.ids for e in tokenizer.encode_batch(texts)]
    keep = [i for i, r in enumerate(rows) if len(r) <= MAX_PROMPT]
    table = np.zeros((len(keep), MAX_PROMPT), np.int64)
    for j, i in enumerate(keep):
        table[j, : len(rows[i])] = rows[i]
    return [pairs[i] for i in keep], table, np.array([len(rows[i]) for i in keep])


def write_shard(job: tuple[Path, np.ndarray, list[tuple[str, str]], np.ndarray, Tokenizer]) -> tuple[int, int, int]:
    """Decode the finished answers of some rows to xz JSONL {"prompt", "answer", "end"}: (documents, tokens, bytes)."""
    path, log, pairs, lengths, tokenizer = job
    documents = tokens = size = 0
    with lzma.open(path, "wt", preset=4, encoding="utf-8") as f:
        for row in log.T:
            starts = np.flatnonzero(row < 0)
            for a, b in zip(starts[:-1], starts[1:], strict=True):
                i = -int(row[a]) - 1
                answer = row[a + lengths[i] : b]
                text = pairs[i][1] + tokenizer.decode(answer.tolist())
                # A row that was cut by the window has no end-of-turn token: it is used as prose only.
                record = {"prompt": pairs[i][0], "answer": text, "end": bool(b - a < WINDOW)}
                f.write(json.dumps(record, ensure_ascii=False) + "\n")
                documents, tokens, size = documents + 1, tokens + len(answer), size + len(text.encode())
    return documents, tokens, size


def new_state(batch: int, steps: int, prompts: torch.Tensor, device: str) -> State:
    cache = (LAYERS, batch, KV_HEADS, WINDOW, HEAD_DIM)
    ids = torch.arange(batch, device=device)
    return State(
        token=prompts[ids % len(prompts), 0].clone(),
        start=torch.zeros(batch, dtype=torch.int64, device=device),
        prompt_id=ids % len(prompts),
        pos=torch.zeros((), dtype=torch.int64, device=device),
        next_prompt=torch.tensor(batch, device=device),
        log=torch.zeros(steps, batch, dtype=torch.int32, device=device),
        ring=torch.zeros(batch, WINDOW, dtype=torch.int64, device=device),
        k=torch.zeros(cache, dtype=torch.bfloat16, device=device),
        v=torch.zeros(cache, dtype=torch.bfloat16, device=device),
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200, help="sampling stops after this time")
    parser.add_argument("--steps", type=int, default=40000, help="sampling stops after this many positions")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=300000)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    began = time.time()
    torch.manual_seed(args.seed)
    reader = GGUFReader(args.gguf)
    tokenizer = build_tokenizer(reader)
    weights = load_weights(reader, args.device)
    pairs, table, lengths = encode_prompts(tokenizer, args.seed, args.prompts)
    prompts, prompt_lengths = torch.from_numpy(table).to(args.device), torch.from_numpy(lengths).to(args.device)
    exponent = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64, device=args.device) / HEAD_DIM
    freqs = 1.0 / reader.fields["llama.rope.freq_base"].contents() ** exponent
    s = new_state(args.batch, args.steps, prompts, args.device)
    print(f"ready after {time.time() - began:.1f} s, {len(pairs)} prompts", flush=True)

    began = time.time()
    speeds: dict[Attend, float] = {}
    done = 0
    while done < args.steps and time.time() - began < args.seconds:
        untried = [a for a in (attend_matmul, attend_fused) if a not in speeds]
        attend = untried[0] if untried else min(speeds, key=speeds.__getitem__)
        mark = time.time()
        for _ in range(min(20, args.steps - done)):
            step(weights, s, freqs, attend, prompts, prompt_lengths)
        done = int(s.pos)  # also waits for the device
        if done > 20:  # the first 20 steps warm up
            speeds[attend] = time.time() - mark
        if done % 1000 < 20:
            print(f"{done} {attend.__name__} {done * args.batch / (time.time() - began):.0f} tokens/s", flush=True)
    seconds = time.time() - began
    log = s.log[:done].cpu().numpy()
    began = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = [
        (args.out / f"smollm-{i:02d}.jsonl.xz", np.ascontiguousarray(part), pairs, lengths, tokenizer)
        for i, part in enumerate(np.array_split(log, args.shards, axis=1))
    ]
    with multiprocessing.get_context("fork").Pool(args.shards) as pool:
        counts = np.array(pool.map(write_shard, jobs, chunksize=1)).sum(0).tolist()
    stats = {
        "documents": counts[0], "answer_tokens": counts[1], "answer_bytes": counts[2], "positions": done,
        "batch": args.batch, "sampling_seconds": seconds, "tokens_per_second": done * args.batch / seconds,
        "writing_seconds": time.time() - began,
    }  # fmt: skip
    print(json.dumps(stats), flush=True)


if __name__ == "__main__":
    main()
