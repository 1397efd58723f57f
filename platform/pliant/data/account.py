"""Where every token of a data set goes: from its files to the rows of an epoch."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pliant.data.plan import DataPlan
from pliant.data.store import Prepared

COUNTED_PACKS = 4096
"""Packs that are looked at together; memory stays bounded whatever the data set."""
DROPPED = ("overlong_truncated", "overlong_dropped", "no_targets", "empty")


@dataclass(frozen=True)
class TokenAccount:
    """Of the training split. tokens = trained + masked + what was dropped, by reason; and room =
    epoch_tokens + padding."""

    counts: dict[str, int]
    """As `tokens.Accounting`."""
    rows: int
    """Of the first epoch."""
    seq_len: int
    epoch_tokens: int
    """Tokens in these rows: those that were kept, once each, or a mixture's share of them."""

    @property
    def room(self) -> int:
        return self.rows * self.seq_len

    @property
    def padding(self) -> int:
        return self.room - self.epoch_tokens

    @property
    def dropped(self) -> dict[str, int]:
        """Tokens that are not trained on, by reason; only reasons that there are."""
        return {name: self.counts[name] for name in DROPPED if self.counts[name]}

    def figures(self) -> dict[str, int]:
        """Everything by name, for records."""
        epoch = {"rows": self.rows, "epoch_tokens": self.epoch_tokens, "padding": self.padding}
        return self.counts | epoch

    def sentence(self) -> str:
        counts = self.counts
        parts = [f"{counts['trained']:,} trained", f"{counts['masked']:,} masked"]
        parts += [f"{count:,} {name}" for name, count in self.dropped.items()]
        left_out = [f"{counts[name]:,} {name}" for name in ("bad", "filtered") if counts[name]]
        return (
            f"{counts['tokens']:,} tokens of {counts['samples']:,} samples = {' + '.join(parts)}; "
            f"an epoch has {self.rows:,} rows of {self.seq_len:,}, "
            f"{self.padding / self.room:.2%} of them padding"
            + (f"; left out: {', '.join(left_out)} records" if left_out else "")
        )


def account_for(prepared: Prepared, plan: DataPlan) -> TokenAccount:
    """The account of a run's training data."""
    counts: dict[str, Any] = prepared.manifest["accounting"]["train"]
    epoch = plan.epoch(0)
    tokens = 0
    for first in range(0, epoch.num_packs, COUNTED_PACKS):
        packs = epoch.packs(first, min(first + COUNTED_PACKS, epoch.num_packs))
        tokens += int(plan.split.lengths[packs.items].sum(dtype=np.int64))
    return TokenAccount(dict(counts), epoch.num_packs, plan.settings.seq_len, tokens)
