"""Repetition, presence and frequency penalties, and the token counts they need.

Symbols: `S` sequences, `V` vocabulary.
"""

from collections.abc import Iterable

import torch


class TokenCounts:
    """Counts each token's occurrences, only for rows with penalties.

    Each row with penalties has a *slot* on the device, with `V` counts. Slots are allocated on
    demand. The owner calls `add` and `release` as rows come and go.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._row_to_slot: dict[int, int] = {}
        self._free_slots: list[int] = []
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._in_output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def add(self, row: int, prompt: torch.Tensor, output: torch.Tensor) -> None:
        """Count a new row's known tokens: `prompt` and `output` are int64[N] on the device."""
        if not self._free_slots:
            self._grow()
        slot = self._free_slots.pop()
        self._row_to_slot[row] = slot
        self._in_prompt[slot].zero_().index_fill_(0, prompt, True)
        self._in_output[slot].zero_().index_add_(
            0, output, torch.ones_like(output, dtype=torch.int32)
        )

    def release(self, rows: Iterable[int]) -> None:
        """Forget rows; rows without counts are ignored."""
        for row in rows:
            if (slot := self._row_to_slot.pop(row, None)) is not None:
                self._free_slots.append(slot)

    def slots(self, rows: Iterable[int]) -> list[int]:
        """Return the slots of rows; valid until a row is added or released."""
        return [self._row_to_slot[row] for row in rows]

    def record(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count one more output token of each slot; the arguments are int64[S] on the device."""
        ones = torch.ones_like(token_ids, dtype=torch.int32)
        self._in_output.index_put_((slots, token_ids), ones, accumulate=True)

    def penalize(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        repetition: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
    ) -> torch.Tensor:
        """Return the logits after repetition, presence and frequency penalties, in this order.

        Args:
            logits: float32[S, V]; not changed.
            slots: int64[S], from `slots`.
            repetition: float32[S, 1]; if the token is in the prompt or the output, divides a
                positive logit and multiplies a negative one.
            presence: float32[S, 1]; subtracted from the logit if the token is in the output.
            frequency: float32[S, 1]; subtracted once per occurrence in the output.
        """
        counts = self._in_output.index_select(0, slots)  # [S, V]
        in_output = counts > 0
        seen = self._in_prompt.index_select(0, slots) | in_output
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        penalized = torch.where(seen, scaled, logits)
        return penalized - presence * in_output - frequency * counts

    def _grow(self) -> None:
        num_slots = len(self._in_prompt)
        num_more = max(1, num_slots)
        self._free_slots.extend(range(num_slots, num_slots + num_more))
        shape = (num_more, self._vocab_size)
        self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(shape)])
        self._in_output = torch.cat([self._in_output, self._in_output.new_zeros(shape)])
