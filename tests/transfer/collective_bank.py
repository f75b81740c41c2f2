"""A bank by plain collectives: slow, simple, and unforgiving about the layer's promises.

`weights` and `collect_returns` are collectives of the EP group. What it gave out is overwritten with NaN as soon as the
layer may no longer read it, and gradients are refused twice or out of turn.
"""

import torch
import torch.distributed as dist

from equipoise.transfer.node import ExpertWeights


class CollectiveBank:
    """Gathers all home weights for every visit, and all replica gradients for every return."""

    def __init__(self, plan, layers, group):
        """
        Args:
            layers: this rank's `BalancedExperts`, by layer index
        """
        self.plan, self.layers, self.group, self.rank = plan, layers, group, group.rank()
        self.log = []
        self._given = (None, None)
        self._handed_in = {}

    def wait_for(self, visit):
        pass

    def joined(self, visit):
        return None

    def weights(self, visit):
        self.log.append(("weights", *visit))
        if visit != self._given[0]:
            self._spoil()
            self._given = (visit, self._gather(visit))
        return self._given[1]

    def hand_in(self, micro_step, layer, gradients):
        self.log.append(("hand_in", micro_step, layer))
        assert (micro_step, layer) not in self._handed_in, "handed in twice"
        assert self._given[0] == (micro_step, "backward", layer), "gradients of another visit's weights"
        self._handed_in[micro_step, layer] = ExpertWeights(*(None if g is None else g.clone() for g in gradients))
        self._spoil()

    def collect_returns(self, micro_step, layer, gradients):
        self.log.append(("collect", micro_step, layer))
        mine = self._handed_in.pop((micro_step, layer))
        used = [0] * self.group.size()
        places = []
        for expert, rank in self.plan.replicas(micro_step, layer):
            if self.plan.home_LE[layer, expert] == self.rank:
                places.append((rank, used[rank], int(self.plan.home_slot_LE[layer, expert])))
            used[rank] += 1
        for total, returned in zip(gradients, mine, strict=True):
            if total is not None:
                gathered_RS = self._gather_padded(returned)
                for rank, slot, home_slot in sorted(places):
                    total[home_slot] += gathered_RS[rank][slot]

    def _gather(self, visit):
        home = self.layers[visit.layer].home
        mine = [e for e, rank in self.plan.replicas(visit.micro_step, visit.layer) if rank == self.rank]
        place = torch.tensor(
            [
                int(self.plan.home_LE[visit.layer, e]) * self.plan.home_slots
                + int(self.plan.home_slot_LE[visit.layer, e])
                for e in mine
            ],
            dtype=torch.int64,
        )
        return ExpertWeights(*(None if t is None else torch.cat(self._all(t.detach()))[place] for t in home))

    def _gather_padded(self, tensor):
        padded = tensor.new_zeros((self.plan.slots, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        return self._all(padded)

    def _all(self, tensor):
        parts = [torch.empty_like(tensor) for _ in range(self.group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts

    def _spoil(self):
        if self._given[1] is not None:
            for tensor in self._given[1].tensors():
                tensor.fill_(float("nan"))
        self._given = (None, None)
