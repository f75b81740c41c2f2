"""Show a demo: `python -m equipoise.sim`."""

import sys

from equipoise.sim.step import simulate_demo
from equipoise.sim.summary import summary

if __name__ == "__main__":
    sys.stdout.write(summary(simulate_demo(), title="a generated step"))
