"""What a user installs: the sdist builds the wheel, the wheel imports by itself, and the pages about it are current."""

import os
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import equipoise

ROOT = Path(__file__).parents[1]
USE_IT = """
import equipoise
from importlib.metadata import version
from equipoise.cli.app import build_app
from equipoise.report import page
print(equipoise.__file__, version("equipoise"), equipoise.ModelShape.preset("olmoe").experts)
"""


def python(*arguments, cwd, env=None):
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    python("-m", "hatchling", "build", "-t", "sdist", "-d", str(folder), cwd=ROOT)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"equipoise-{equipoise.__version__}"


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel, built from the sdist alone."""
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=sdist)
    return next(folder.glob("*.whl"))


def package_files(folder):
    """Every file of the package but what running it leaves behind."""
    files = [path for path in (folder / "equipoise").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)) for path in files}


def test_sdist_and_wheel_hold_the_whole_package_and_no_tests(sdist, wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == package_files(sdist) == package_files(ROOT)
    for data in ("py.typed", "cost/profiles/h200.json", "report/templates/page.html", "rl/presets/tiny.toml"):
        assert f"equipoise/{data}" in held
    assert {path.name for path in sdist.iterdir() if path.suffix in (".md", ".cff")} == {
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
    }
    assert not (sdist / "tests").exists()


def test_the_wheel_imports_where_nothing_else_of_ours_is(wheel, tmp_path):
    target = tmp_path / "target"
    install = ("-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--target", str(target), str(wheel))
    python(*install, cwd=tmp_path)
    # -S: no site, so no editable install; its libraries are named instead.
    paths = os.pathsep.join([str(target), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    file, version, experts = python(
        "-S", "-c", USE_IT, cwd=tmp_path, env={"PYTHONPATH": paths, "HOME": str(tmp_path)}
    ).split()
    assert Path(file).is_relative_to(target)
    assert (version, experts) == (equipoise.__version__, "64")


def test_the_page_of_public_names_is_current():
    script = runpy.run_path(str(ROOT / "docs" / "api.py"))
    assert script["PAGE"].read_text() == script["render"](), "run: python docs/api.py"


def test_change_log_and_citation_name_this_version_and_both_papers():
    assert f"\n## {equipoise.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {equipoise.__version__}\n" in citation
    assert all(paper in citation for paper in ("2606.11867", "2605.08639"))
