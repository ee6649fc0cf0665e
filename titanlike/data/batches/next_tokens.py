"""The inputs and labels of multi-token prediction, made of full sequences, before ranks take their parts of them."""

from typing import Any

import numpy as np

from titanlike.data.tokens.arrays import Numbers
from titanlike.losses import IGNORE


def next_tokens(tokens: Numbers, labels: Numbers, document_ids: Numbers | None, number: int) -> dict[str, Any]:
    """Returns `next_tokens` and `next_labels` (N, T, `number`): for each position, the tokens that follow it, and the label of
    each, the token after it. There is no label where a sequence or a document ends before it.

    Args:
        tokens: full sequences (N, T + 1), with one token more than `labels` and `document_ids` (N, T).
    """
    inputs = np.zeros((*labels.shape, number), tokens.dtype)
    targets = np.full((*labels.shape, number), IGNORE, labels.dtype)
    for i in range(number):
        ahead = i + 1
        inputs[:, : tokens.shape[1] - ahead, i] = tokens[:, ahead:]
        labels_ahead = labels[:, ahead:]
        if document_ids is not None:
            labels_ahead = np.where(document_ids[:, ahead:] == document_ids[:, :-ahead], labels_ahead, IGNORE)
        targets[:, : labels_ahead.shape[1], i] = labels_ahead
    return {"next_tokens": inputs, "next_labels": targets}
