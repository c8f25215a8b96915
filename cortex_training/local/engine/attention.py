"""Which token may attend to which: causal, without padding, and never across the documents of a packed sequence."""

from __future__ import annotations

import torch


def documents(position_ids: torch.Tensor) -> torch.Tensor:
    """Number the documents of packed rows, [batch, sequence]: one starts wherever positions do not go on by 1."""
    starts = torch.zeros_like(position_ids)
    starts[:, 1:] = (position_ids[:, 1:] != position_ids[:, :-1] + 1).long()
    return starts.cumsum(dim=1)


def attention_for(
    attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """The mask to give the model: None (all causal), the [batch, sequence] mask, or an additive [batch, 1, query, key]
    one.

    The last is made only for packed rows, where it is needed, because the first two let the model choose a faster
    kernel.
    """
    if position_ids is None:
        return attention_mask
    document = documents(position_ids)
    if attention_mask is not None:
        # Padding usually repeats a position, which starts no document anyone looks at.
        document = torch.where(attention_mask, document, 0)
    if not bool((document != document[:, :1]).any()):
        return attention_mask
    length = document.shape[1]
    allowed = document[:, :, None] == document[:, None, :]
    allowed &= torch.ones(length, length, dtype=torch.bool, device=document.device).tril()
    if attention_mask is not None:
        allowed &= attention_mask[:, None, :]
    # A padding row that may look at nothing would make the softmax divide by zero.
    allowed |= torch.eye(length, dtype=torch.bool, device=document.device)
    additive = torch.zeros(allowed.shape, dtype=dtype, device=document.device).masked_fill_(
        ~allowed, torch.finfo(dtype).min
    )
    return additive[:, None]
