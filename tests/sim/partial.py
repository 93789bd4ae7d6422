"""Hits that end inside a block, as vLLM makes them with a matching unit below the block.

A cached block of which a part is hit is copied into a fresh one before the step that writes
it. A running state is copied aside at the prompt's last hash, in the step that goes on from
there, and the copy is handed over. At the end of a request its own blocks are, too.
"""

from __future__ import annotations

from kvtier.connector.geometry import GroupKind


class PartialTails:
    """What the simulated scheduler does about parts of blocks."""

    @property
    def fine(self):
        return self.geometry.hit_alignment_tokens < self.geometry.scheduler_block_tokens

    def _tail_of(self, request):
        """Where a prefill stops so that a hit may end there; 0 where it need not."""
        if not self.fine:
            return 0
        unit = self.geometry.hash_block_tokens
        return max(0, request.num_prompt_tokens - 1) // unit * unit

    def _hash_at(self, request, tokens):
        return request.block_hashes[tokens // self.geometry.hash_block_tokens - 1]

    def _copy_of(self, source):
        """A fresh block that holds what ``source`` does once this step's copies have run."""
        (copy,) = self.pool.take(1)
        self.fresh.append(copy)
        self.copies.append((source, copy))
        return copy

    def _longest_local_hit(self, request):
        """Return tokens, whole blocks and partly hit ones by group; and the hit in whole blocks."""
        floor, floor_rows = self._local_hit(request)
        if not self.fine or request.skip_reading_prefix_cache:
            return floor, floor_rows, {}, floor, floor_rows
        unit, step = self.geometry.hash_block_tokens, self.geometry.scheduler_block_tokens
        for tokens in range((request.num_tokens - 1) // unit * unit, floor, -unit):
            found = self._local_parts(request, tokens)
            if found is not None:
                rows, tails = found
                below = tokens // step * step
                if below == floor:
                    return tokens, rows, tails, floor, floor_rows
                # Attention reaches further than any state at whole blocks: all that the
                # hit in whole blocks lacks is to be loaded, or comes with the hit inside one.
                cut = [
                    self._whole_row(group, row, below)
                    for group, row in zip(self.geometry.groups, rows, strict=True)
                ]
                return tokens, rows, tails, below, cut
        return floor, floor_rows, {}, floor, floor_rows

    def _whole_row(self, group, row, tokens):
        if group.kind is GroupKind.RECURRENT:
            return [self.pool.blocks[0]] * (tokens // group.block_tokens)
        return row[: tokens // group.block_tokens]

    def _local_parts(self, request, tokens):
        rows, tails = [], {}
        for group in self.geometry.groups:
            whole, rest = divmod(tokens, group.block_tokens)
            first = whole if group.kind is GroupKind.RECURRENT else 0
            if group.kind is GroupKind.RECURRENT and not rest:
                first = whole - 1
            row = [self.pool.blocks[0]] * first
            row += [
                self.pool.cached.get(self._name(request, group, i)) for i in range(first, whole)
            ]
            if None in row:
                return None
            if rest:
                tail = self.pool.tails.get((group.group_id, self._hash_at(request, tokens)))
                if tail is None:
                    return None
                tails[group.group_id] = tail
            rows.append(row)
        return rows, tails

    def _snapshot(self, request):
        """Copy states aside at the prompt's last hash; returns what is handed over."""
        tokens = request.num_computed_tokens
        due = tokens and tokens == self._tail_of(request) and request.snapshot_at != tokens
        inside = [g for g in self.geometry.groups if due and tokens % g.block_tokens]
        states = [g for g in inside if g.kind is GroupKind.RECURRENT]
        if len(states) > len(self.pool.free) or self.rng.random() < 0.2:
            return []
        offers = []
        for group in inside:
            block = request.table[group.group_id][(tokens - 1) // group.block_tokens]
            if group.kind is GroupKind.RECURRENT:
                block = self._copy_of(block)
                self.held.append(block)
                offers.append((group.group_id, block.block_id, tokens))
            self.pool.cache_tail(block, (group.group_id, self._hash_at(request, tokens)))
        if due:
            request.snapshot_at = tokens
        return offers

    def _offer_at_finish(self, request):
        """The states of a finished request where they are at a hash, if it ends at one."""
        tokens = request.num_computed_tokens
        at_hash = tokens and not tokens % self.geometry.hash_block_tokens
        if not self.fine or not at_hash or self.rng.random() < 0.3:
            return
        offers = [
            (
                group.group_id,
                request.table[group.group_id][(tokens - 1) // group.block_tokens].block_id,
                tokens,
            )
            for group in self.geometry.groups
            if group.kind is GroupKind.RECURRENT
        ]
        self.half.partial_tail(request, self._ids(request), offers)
