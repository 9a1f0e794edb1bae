"""The compact teacher: log-probability of the realised token, and the target's top candidates, per supervised token.

Legend: B documents of a batch, S tokens of a document, D hidden size, V vocabulary, k candidates, N supervised tokens
of the batch, c of them in a chunk.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor


@torch.no_grad()
def compact_teacher(
    last_hidden_BSD: Tensor,
    head: Tensor | Callable[[Tensor], Tensor],
    token_ids: Sequence[np.ndarray],
    loss_masks: Sequence[np.ndarray],
    top_k: int = 0,
    chunk_tokens: int = 256,
) -> list[tuple[np.ndarray, np.ndarray | None, np.ndarray | None]]:
    """What the target says about each supervised token given the tokens before it.

    No block is ever trained on another token, and the head is a fifth of SmolLM2's work, 7 % of Qwen3-8B's: prompts are
    spared it. At most `chunk_tokens` rows of logits exist at a time: 156 MB in float32 at V = 151,936, where a shard of
    32,768 tokens would need 20 GB.

    Args:
        last_hidden_BSD: output of the target's final norm, on any device, padded on the right.
        head: the LM head (V, D), or a function from (c, D) to logits (c, V) of its own making, such as `Target.logits`.
        token_ids: tokens of each document, (S,) integers.
        loss_masks: (S,), not 0 where a token is supervised.
        top_k: candidates per token; 0 for none.
    Returns:
        per document target_logprob_S (float32; index t is log p(token_t | tokens before t)), topk_ids_Sk (int32) and
        topk_logprobs_Sk (float16), most likely first; None when `top_k` is 0. All are 0 at index 0, which nothing
        predicts, and at tokens that are not supervised.
    """
    logits_of = head if not isinstance(head, Tensor) else lambda hidden: hidden @ head.T
    at = [np.flatnonzero(np.asarray(mask)[1:]) + 1 for mask in loss_masks]
    labels_N = np.concatenate([np.asarray(ids)[t] for ids, t in zip(token_ids, at, strict=True)])
    # Row t - 1 of the hidden states predicts token t.
    rows_N = np.concatenate([row * last_hidden_BSD.shape[1] + t - 1 for row, t in enumerate(at)])
    device, N = last_hidden_BSD.device, len(rows_N)
    logprob_N = np.zeros(N, np.float32)
    ids_Nk, logprobs_Nk = np.zeros((N, top_k), np.int32), np.zeros((N, top_k), np.float16)
    flat_D = last_hidden_BSD.flatten(0, 1)
    for a in range(0, N, chunk_tokens):
        chunk = slice(a, a + chunk_tokens)
        labels_c1 = torch.from_numpy(labels_N[chunk].astype(np.int64)).to(device)[:, None]
        logits_cV = logits_of(flat_D[torch.from_numpy(rows_N[chunk]).to(device)]).float()
        label_c1, best_c1 = logits_cV.gather(-1, labels_c1), logits_cV.amax(-1, keepdim=True)
        top = logits_cV.topk(top_k, dim=-1) if top_k else None
        # In place: `logsumexp` makes fresh tensors of V columns, whose pages cost a CPU a third of the head's time.
        lse_c1 = logits_cV.sub_(best_c1).exp_().sum(-1, keepdim=True).log_().add_(best_c1)
        logprob_N[chunk] = (label_c1 - lse_c1)[:, 0].cpu().numpy()
        if top is not None:
            ids_Nk[chunk] = top.indices.int().cpu().numpy()
            logprobs_Nk[chunk] = (top.values - lse_c1).half().cpu().numpy()

    made, a = [], 0
    for ids, t in zip(token_ids, at, strict=True):
        found = []
        for values in (logprob_N, ids_Nk, logprobs_Nk):
            out = np.zeros((len(ids), *values.shape[1:]), values.dtype)
            out[t] = values[a : a + len(t)]
            found.append(out)
        made.append((found[0], *(found[1:] if top_k else (None, None))))
        a += len(t)
    return made
