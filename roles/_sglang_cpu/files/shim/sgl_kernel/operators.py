# SPDX-License-Identifier: Apache-2.0
"""The operators that SGLang 0.5.20 calls on a CPU, in plain torch.

Shapes: ``q`` [tokens, heads, head_dim], ``k`` [tokens, kv_heads, head_dim], ``v`` [tokens, kv_heads, value_dim];
KV pools [slots, kv_heads, dim]; ``req_to_token`` [requests, positions] maps a request's positions to slots.
Softmax runs in float32, as in the CUDA kernels.
"""

from __future__ import annotations

import torch


def _attend(q, k, v, scale, logit_cap, first_position):
    """Attention of one request's queries over its keys; queries stand at ``first_position`` and on (None: not causal)."""
    group = q.shape[1] // k.shape[1]
    k = k.to(q.dtype).repeat_interleave(group, 1)
    v = v.to(q.dtype).repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if first_position is not None:
        query_at = torch.arange(q.shape[0]).unsqueeze(1) + first_position
        key_at = torch.arange(k.shape[0]).unsqueeze(0)
        scores = scores.masked_fill(key_at > query_at, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()).to(q.dtype)


def extend_attention_cpu(q, k, v, out, k_pool, v_pool, *rest):
    """Prefill: fills ``out`` with attention over each request's cached prefix and its new tokens."""
    rest = rest if torch.is_tensor(rest[0]) else rest[2:]  # k and v scales, not used in float32
    req_to_token, requests, lengths, extend_lengths, starts, _longest, scale, logit_cap = rest[:8]
    causal = rest[13] if len(rest) > 13 else True
    for row in range(lengths.shape[0]):
        count, start = int(extend_lengths[row]), int(starts[row])
        prefix = int(lengths[row]) - count
        span = slice(start, start + count)
        keys, values = k[span], v[span]
        if prefix:  # Without one, MLA's keys may be expanded to all heads, and the pool's are not.
            slots = req_to_token[requests[row], :prefix].long()
            keys = torch.cat([k_pool[slots].to(k.dtype), keys])
            values = torch.cat([v_pool[slots].to(v.dtype), values])
        out[span] = _attend(q[span], keys, values, scale, logit_cap, prefix if causal else None)


def decode_attention_cpu(q, k_pool, v_pool, *rest):
    """Decode: stores each request's new key and value, then fills ``out`` with attention over all of its tokens."""
    rest = rest if torch.is_tensor(rest[0]) else rest[2:]
    out, k, v, slots, _logits, req_to_token, requests, lengths, scale, logit_cap = rest[:10]
    if k is not None:
        k_pool[slots.long()] = k.view(-1, *k_pool.shape[1:]).to(k_pool.dtype)
        v_pool[slots.long()] = v.view(-1, *v_pool.shape[1:]).to(v_pool.dtype)
    for row in range(lengths.shape[0]):
        held = req_to_token[requests[row], : int(lengths[row])].long()
        out[row : row + 1] = _attend(q[row : row + 1], k_pool[held], v_pool[held], scale, logit_cap, None)


def assign_req_to_token_pool_cpu(requests, req_to_token, starts, ends, slots, _row_length):
    """Writes the slots of each request's new tokens, given one after another, into the request's row."""
    used = 0
    for row in range(requests.shape[0]):
        start, end = int(starts[row]), int(ends[row])
        req_to_token[int(requests[row]), start:end] = slots[used : used + end - start].to(req_to_token.dtype)
        used += end - start


def register_operators():
    """Make them ``torch.ops.sgl_kernel.*``, where SGLang's attention backend looks."""
    for operator in (extend_attention_cpu, decode_attention_cpu):
        setattr(torch.ops.sgl_kernel, operator.__name__, operator)
