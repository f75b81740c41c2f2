"""Show a demo: `python -m equipoise.report` simulates a generated step and writes its page to report.html."""

import sys
from pathlib import Path

from equipoise.report import as_text, summarise, write_report
from equipoise.sim.demo import simulate_demo

if __name__ == "__main__":
    sys.stdout.write("Simulating a generated step (the first run on a machine compiles for a minute) ...\n\n")
    sys.stdout.flush()
    page = write_report(simulate_demo(), "report.html", title="a generated step")
    sys.stdout.write(as_text(summarise(page)[:2]))
    sys.stdout.write(f"\nWritten: {Path('report.html').resolve()}; open it in a browser, no network needed\n")
