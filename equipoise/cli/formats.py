"""List the forms in which routes can be read and written.

equipoise formats
equipoise formats --json
"""

from equipoise.cli.options import JsonFlag
from equipoise.cli.output import print_json, screen


def formats(as_json: JsonFlag = False) -> None:
    """List the forms in which routes can be read and written."""
    from rich.table import Table

    from equipoise.routes.registry import FORMATS

    table = Table("form", "what it is", "written to", title="Forms of recorded routes", title_justify="left")
    for form in FORMATS:
        table.add_row(form.name, form.summary, " ".join(form.suffixes))
    screen(as_json=as_json).print(table)
    if as_json:
        listed = [{"name": f.name, "summary": f.summary, "suffixes": list(f.suffixes)} for f in FORMATS]
        print_json({"formats": listed})
