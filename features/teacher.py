"""The compact teacher: log-probability of the realised token, and the target's top candidates, per token.

Legend: S tokens of a document, D hidden size, V vocabulary, k candidates, c tokens of a chunk.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


@torch.no_grad()
def compact_teacher(
    last_hidden_SD: Tensor,
    head: Tensor | Callable[[Tensor], Tensor],
    token_ids_S: Tensor | np.ndarray,
    top_k: int = 0,
    chunk_tokens: int = 256,
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """What the target says about each token given the tokens before it.

    At most `chunk_tokens` rows of logits exist at a time: 156 MB in float32 at V = 151,936, where a shard of 32,768
    tokens would need 20 GB.

    Args:
        last_hidden_SD: output of the target's final norm, on any device.
        head: the LM head (V, D), or a function from (c, D) to logits (c, V) such as `Target.logits`.
        token_ids_S: the document's tokens.
        top_k: candidates per token; 0 for none.
    Returns:
        target_logprob_S (float32; index t is log p(token_t | tokens before t), index 0 is 0),
        topk_ids_Sk (int32) and topk_logprobs_Sk (float16), most likely first, index 0 zero; None when `top_k` is 0.
    """
    logits_of = head if not isinstance(head, Tensor) else lambda hidden: hidden @ head.T
    S = len(last_hidden_SD)
    logprob_S = np.zeros(S, np.float32)
    ids_Sk, logprobs_Sk = np.zeros((S, top_k), np.int32), np.zeros((S, top_k), np.float16)
    tokens = torch.as_tensor(token_ids_S).to(last_hidden_SD.device, torch.int64)
    for a in range(0, S - 1, chunk_tokens):
        b = min(a + chunk_tokens, S - 1)
        # Row a of the hidden states predicts token a + 1.
        logits_cV = logits_of(last_hidden_SD[a:b]).float()
        lse_c1 = logits_cV.logsumexp(-1, keepdim=True)
        label_c1 = logits_cV.gather(-1, tokens[a + 1 : b + 1, None])
        logprob_S[a + 1 : b + 1] = (label_c1 - lse_c1)[:, 0].cpu().numpy()
        if top_k:
            top = logits_cV.topk(top_k, dim=-1)
            ids_Sk[a + 1 : b + 1] = top.indices.int().cpu().numpy()
            logprobs_Sk[a + 1 : b + 1] = (top.values - lse_c1).half().cpu().numpy()
    return logprob_S, *((ids_Sk, logprobs_Sk) if top_k else (None, None))
