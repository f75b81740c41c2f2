"""Show a demo: `python -m equipoise.report` simulates a generated step and writes its page to report.html.

Exit code 2 if there is a report.html already: it may be of another result.
"""

import sys
from pathlib import Path

from equipoise.report import as_text, summarise, write_report
from equipoise.sim.step import simulate_demo


def main(place: Path) -> None:
    """Write the demo's page to `place`, which must be free, and its summary to standard output."""
    if place.exists():
        sys.stderr.write(
            f"{place} already exists; take it away, or run: equipoise simulate --demo --report OTHER.html\n"
        )
        raise SystemExit(2)
    sys.stdout.write("Simulating a generated step (the first run on a machine compiles for a minute) ...\n\n")
    sys.stdout.flush()
    page = write_report(simulate_demo(), place, title="a generated step")
    sys.stdout.write(as_text(summarise(page)[:2]))
    sys.stdout.write(f"\nWritten: {place.resolve()}; open it in a browser, no network needed\n")


if __name__ == "__main__":
    main(Path("report.html"))
