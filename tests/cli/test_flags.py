"""Groups of options: flags on the command line, one object in the verb, a section in the help."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from equipoise.cli.app import SectionedCommand, flatten


@dataclass(frozen=True, kw_only=True)
class Soil:
    """Where it grows."""

    SECTION: ClassVar[str] = "The soil"
    depth: Annotated[int, typer.Option("--how-deep", min=1, help="Depth in cm.")] = 3
    wet: Annotated[bool, typer.Option("--wet", help="Whether it rained.")] = False


@dataclass(frozen=True, kw_only=True)
class Seed:
    """What is sown."""

    SECTION: ClassVar[str] = "The seed"
    kind: Annotated[str, typer.Option(help="Its kind.")]


DEEP = Soil(depth=9)
got: list[tuple] = []


def sow(place: Annotated[str, typer.Argument(help="Where.")], *, soil: Soil, seed: Seed, loud: bool = False) -> None:
    """Sow."""
    got.append((place, soil, seed, loud))


def sow_deep(*, soil: Soil = DEEP) -> None:
    """Sow deeper."""
    got.append((soil,))


@pytest.fixture
def call():
    """Call `call(verb, word, ...)` and get what typer's runner saw."""
    got.clear()

    def run(verb, *words):
        app = typer.Typer(rich_markup_mode=None)
        app.command(cls=SectionedCommand)(flatten(verb))
        return CliRunner().invoke(app, list(words))

    return run


def test_a_group_is_one_object_with_what_was_given_or_the_default(call):
    assert call(sow, "here", "--how-deep", "5", "--kind", "oak", "--loud").exit_code == 0
    assert call(sow, "there", "--kind", "elm", "--wet").exit_code == 0
    assert got == [
        ("here", Soil(depth=5), Seed(kind="oak"), True),
        ("there", Soil(wet=True), Seed(kind="elm"), False),
    ]


def test_a_default_object_gives_the_defaults_of_its_fields(call):
    assert call(sow_deep, "--wet").exit_code == 0
    assert got == [(Soil(depth=9, wet=True),)]
    assert "[default: 9; x>=1]" in call(sow_deep, "--help").output
    assert "[default: 3; x>=1]" in call(sow, "--help").output


def test_a_field_without_a_default_is_required_and_limits_hold(call):
    missing, low = call(sow, "here"), call(sow, "here", "--kind", "oak", "--how-deep", "0")
    assert (missing.exit_code, "--kind" in missing.output) == (2, True)
    assert (low.exit_code, "--how-deep" in low.output) == (2, True)
    assert got == []


def test_the_help_lists_every_flag_once_under_its_section(call):
    shown = call(sow, "--help").output
    sections = ["Arguments:", "The soil:", "The seed:", "Options:"]
    places = [shown.index(title) for title in sections]
    assert places == sorted(places)
    for flag, after in (("--how-deep", 1), ("--wet", 1), ("--kind", 2), ("--loud", 3), ("--help", 3)):
        assert shown.count(f"  {flag}") == 1
        assert [place < shown.index(f"  {flag}") for place in places] == [i <= after for i in range(4)]
