"""A fake model and pool: the next token is a hash of the whole context in the pool.

The pool keeps the token and position written to each slot. A wrong slot, block table, position,
copy or order of tokens changes every token after it.
"""

import numpy as np
import torch

from kernels import PAD_SLOT

VOCAB_SIZE = 97
_MODULUS = 1_000_003


def next_token(token_ids):
    """The fake model's greedy next token."""
    return context_hash(token_ids) % VOCAB_SIZE


def context_hash(token_ids):
    value = 7
    for position, token in enumerate(token_ids):
        value = (value * 31 + int(token) * 5 + position) % _MODULUS
    return value


def continue_greedily(token_ids, count):
    known = list(token_ids)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(token_ids) :]


class FakePool:
    def __init__(self, num_blocks, block_size, max_blocks=None):
        # [max_blocks, block_size, (token, position)]; -1 was never written
        shape = (max_blocks or num_blocks, block_size, 2)
        self.slots = torch.full(shape, -1, dtype=torch.int64)
        self.block_size = block_size
        self.num_blocks = num_blocks

    def close(self):
        pass

    def resize(self, num_blocks):
        self.slots[num_blocks:] = -1
        self.num_blocks = num_blocks

    def copy(self, src, dst):
        self.slots[dst] = self.slots[src]


class FakeModel:
    """Its greedy output is `continue_greedily`; after the token `nan_after` its logits are NaN."""

    def __init__(self, nan_after=None, *, checks_context=True):
        self.nan_after = nan_after
        self._checks_context = checks_context
        self.forwards = []
        """(num_decodes, number of sequences, number of tokens) of each forward pass."""

    def forward(self, token_ids, positions, pool, metadata):
        assert token_ids.dtype == positions.dtype == metadata.slot_mapping.dtype == torch.int64
        assert metadata.block_tables.dtype == metadata.seq_lens.dtype == torch.int32
        assert metadata.query_start_loc.dtype == torch.int32
        lens = metadata.query_start_loc.diff()
        assert (lens[: metadata.num_decodes] == 1).all()
        assert int(lens.max()) == metadata.max_query_len
        assert int(metadata.query_start_loc[-1]) == len(token_ids) == len(positions)
        self.forwards.append((metadata.num_decodes, len(lens), len(token_ids)))
        written = torch.stack([token_ids, positions], dim=1)
        is_stored = metadata.slot_mapping != PAD_SLOT
        pool.slots.view(-1, 2)[metadata.slot_mapping[is_stored]] = written[is_stored]
        self._check_wanted(metadata, positions)
        hidden = np.zeros((len(token_ids), 1))
        for seq, seq_len in enumerate(metadata.seq_lens.tolist()):
            table = metadata.block_tables[seq].long()
            context = pool.slots[table].view(-1, 2)[:seq_len]
            if self._checks_context:
                has = context[:, 1].tolist()
                assert has == list(range(seq_len)), "a slot holds another position"
            tokens = context[:, 0].tolist()
            end = int(metadata.query_start_loc[seq + 1])
            for back in range(min(int(lens[seq]), seq_len)):  # none of a padding row
                known = tokens[: seq_len - back]
                broken = known[-1] == self.nan_after
                hidden[end - 1 - back] = np.nan if broken else context_hash(known)
        return metadata.select(torch.from_numpy(hidden))

    @staticmethod
    def _check_wanted(metadata, positions):
        """Check that the wanted tokens are each sequence's last ones, with consistent metadata."""
        if metadata.wanted is None:
            return
        places, wanted = metadata.wanted.places, metadata.wanted.metadata
        assert metadata.num_wanted == len(places) < len(positions)
        assert torch.equal(wanted.slot_mapping, metadata.slot_mapping[places])
        assert wanted.seq_lens is metadata.seq_lens
        assert wanted.block_tables is metadata.block_tables
        lens = wanted.query_start_loc.diff()
        assert (lens[: wanted.num_decodes] == 1).all()
        assert (lens[wanted.num_decodes :][:1] != 1).all()
        assert int(lens.max()) == wanted.max_query_len
        ends = metadata.query_start_loc[1:].tolist()
        last_ones = [
            range(end - count, end) for end, count in zip(ends, lens.tolist(), strict=True)
        ]
        assert places.tolist() == [place for places in last_ones for place in places]

    def logits(self, hidden):
        values = hidden[:, 0]
        tokens = torch.nan_to_num(values).long() % VOCAB_SIZE
        logits = torch.arange(VOCAB_SIZE, dtype=torch.float32).neg().expand(len(tokens), -1) / 50
        logits = logits.clone()
        logits[torch.arange(len(tokens)), tokens] = 4.0
        logits[values.isnan()] = torch.nan
        return logits
