"""Does balanced training learn what static training learns? A small stack, trained both ways on local ranks.

    case.py     ParityCase: sizes, and the tokens and routes of every window, drawn from a seed
    stack.py    SmallStack: attention stand-in and balanced experts; the same densely in float64
    ranks.py    local processes on gloo
    run.py      train both ways on every rank
    verdict.py  the measures, their limits, and whether they hold

Needs torch. Used by `equipoise parity` and the tests; training code does not import it.
"""
