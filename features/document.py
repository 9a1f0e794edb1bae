"""One document's features on their way into a store, and what keeps them out.

Legend: S tokens of a document, L taps, D hidden size, k teacher candidates.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from features.plan import document_id
from features.spec import FeatureSpec


@dataclass
class DocumentFeatures:
    """What prefill hands over for one planned document.

    `topk_*[t]` describe the target's distribution for token t given the tokens before t, as `target_logprob_S[t]` does;
    all are 0 where the loss mask is, and at index 0.
    A document that could not be computed comes with `error` (a sentence) and goes to the rejects.
    The writer may still be at work on `hidden_SLD` when it asks for the next document: memory that is used again for
    that one must not be handed over.
    """

    document: str
    token_ids_S: np.ndarray | None = None  # int32
    loss_mask_S: np.ndarray | None = None  # uint8
    hidden_SLD: torch.Tensor | None = None  # any float dtype, any device
    target_logprob_S: np.ndarray | None = None  # float32
    topk_ids_Sk: np.ndarray | None = None  # int32
    topk_logprobs_Sk: np.ndarray | None = None  # float16 or float32
    error: str | None = None


class Rejected(Exception):
    """A document that must not enter the store: (reason, detail)."""


def check_document(d: DocumentFeatures, row: dict[str, Any], spec: FeatureSpec) -> None:
    """
    Raises:
        Rejected: with reason and detail; see `python -m features inspect` for what each reason means.
    """
    if d.error is not None:
        raise Rejected("not_computed", d.error)
    n = row["length"]
    fields = {
        "token_ids": (d.token_ids_S, (n,)),
        "loss_mask": (d.loss_mask_S, (n,)),
        "hidden": (d.hidden_SLD, (n, spec.num_taps, spec.hidden_size)),
        "target_logprob": (d.target_logprob_S, (n,)),
    }
    if spec.top_k:
        fields |= {"topk_ids": (d.topk_ids_Sk, (n, spec.top_k)), "topk_logprobs": (d.topk_logprobs_Sk, (n, spec.top_k))}
    for name, (value, shape) in fields.items():
        if value is None:
            raise Rejected("shape", f"{name} is missing")
        if tuple(value.shape) != shape:
            raise Rejected("shape", f"{name} has shape {list(value.shape)}, planned is {list(shape)}")
    if document_id(d.token_ids_S, d.loss_mask_S) != row["document"]:
        raise Rejected("tokens_differ", "token ids or loss mask are not those of the planned document")
    if not d.loss_mask_S.any():
        raise Rejected("nothing_supervised", "the loss mask is 0 everywhere")
    if row["prompt_length"] > 0 and d.loss_mask_S.all():
        raise Rejected(
            "all_supervised", f"the loss mask is 1 everywhere though {row['prompt_length']} tokens are the prompt"
        )
    if not np.isfinite(d.target_logprob_S).all():
        raise Rejected("not_finite", "a target log-probability is NaN or infinite")
    if spec.top_k and not np.isfinite(d.topk_logprobs_Sk).all():
        raise Rejected("not_finite", "a candidate's log-probability is NaN or infinite")
