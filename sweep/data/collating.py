"""How rows of texts become the tensors of a micro-batch, in a trial as in a training.

Rows are padded on the right and no attention mask is passed. None is needed: a decoder's attention
is causal, so that no token sees the pads behind it, and pads carry no loss. Without a mask flash
and sdpa keep their fast kernels. An architecture that also looks ahead has no such rule:
`check_is_causal` refuses it.

Packed rows tell by ``position_ids`` that start again where a text does which tokens are of one
text; transformers derives from them the mask that keeps texts apart. Padding, positions and the
boundaries for flash attention are TRL's collator's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from search_spaces.config import TrialConfig
from sweep.data.epoch import is_flattened, padded_width

IGNORED = -100
"""The label of a token that carries no loss."""
INPUT = "input_ids"
SEQ_LENGTHS = "seq_lengths"
"""The column of a packed row's texts' lengths."""
COMPLETIONS = "completion_mask"
"""The column that is there where completions alone carry loss."""


@dataclass(frozen=True)
class Collator:
    """Makes a micro-batch of rows, each with ``input_ids`` and where texts have it a
    ``completion_mask``; packed rows have ``seq_lengths`` too.

    Returns int64 ``input_ids`` and ``labels`` of shape (rows, width); with packed rows
    ``position_ids`` too, and for flash attention, which takes them as one long row, what it has to
    know of their boundaries. Under ``compile`` a micro-batch has all its rows, of pads where there
    are too few texts for them.
    """

    config: TrialConfig
    pad_token_id: int = 0
    """Any token of the model: pads carry no loss, and no token looks at them."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the micro-batch."""
        # Imported here: it comes with all of the trainer, and random tokens need no collator.
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        examples = [_example(row, self.config.seq_len) for row in rows]
        if self.config.compile and not is_flattened(self.config):
            # The last micro-batch of an epoch would be compiled for its own number of rows.
            missing = self.config.micro_batch_size - len(examples)
            examples += [self._pads(examples[0])] * missing
        lengths = [len(example["input_ids"]) for example in examples]
        longest = sum(lengths) if is_flattened(self.config) else max(lengths)
        collate = DataCollatorForLanguageModeling(
            pad_token_id=self.pad_token_id,
            padding_free=is_flattened(self.config),
            return_position_ids=self.config.packing == "packed",
            pad_to_multiple_of=padded_width(longest, self.config),
        )
        batch: dict[str, Any] = collate(examples)
        batch.pop("attention_mask", None)
        if "position_ids" in batch:
            # What begins a text is predicted from nothing, least of all from the text before it.
            batch["labels"][batch["position_ids"] == 0] = IGNORED
        return batch

    def _pads(self, like: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row of which nothing carries loss."""
        tokens, labels = ([value] for value in (self.pad_token_id, IGNORED))
        row = {"input_ids": np.array(tokens), "labels": np.array(labels)}
        return {**row, SEQ_LENGTHS: [1]} if SEQ_LENGTHS in like else row


def _example(row: Mapping[str, Any], seq_len: int) -> dict[str, Any]:
    """Return a row as TRL's collator takes it, cut on the right."""
    tokens = np.asarray(row["input_ids"][:seq_len], dtype=np.int64)
    labels = tokens.copy()
    if COMPLETIONS in row:
        labels[np.asarray(row[COMPLETIONS][:seq_len]) == 0] = IGNORED
    labels[0] = IGNORED
    example: dict[str, Any] = {"input_ids": tokens, "labels": labels}
    if SEQ_LENGTHS in row:
        example[SEQ_LENGTHS] = list(map(int, row[SEQ_LENGTHS]))
    return example
