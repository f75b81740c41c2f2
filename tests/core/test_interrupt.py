"""Children that are deaf to Ctrl-C, and a starter that is not."""

import signal
import subprocess
import sys
import threading

import pytest

from equipoise.core.interrupt import deaf_children

HEARS = "import signal; print(signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)"


def child_hears() -> str:
    return subprocess.run([sys.executable, "-c", HEARS], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


@pytest.fixture(autouse=True)
def interruptible():
    """Let SIGINT interrupt this process, as in a terminal; processes that share tests ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_child_is_deaf_and_its_starter_hears_again():
    with deaf_children():
        assert child_hears() == "False"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert child_hears() == "True"


def test_the_starter_hears_again_after_an_error():
    with pytest.raises(ValueError, match="no such program"), deaf_children():
        raise ValueError("no such program")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_start_children_too():
    heard = []

    def start() -> None:
        with deaf_children():
            heard.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert heard == [signal.default_int_handler]
