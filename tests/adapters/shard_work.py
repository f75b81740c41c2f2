"""What ranks do in the tests of shards; imports no framework."""

from equipoise.adapters.protocol import cut, gather


def cut_and_gather(group, full):
    own = cut(full, group)
    return own, gather(own, group), gather(own, group, to=2)
