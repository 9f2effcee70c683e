"""What tells whose machine it was does not leave it."""

import os
from pathlib import Path

import pytest

from findings import finding
from specbisect.report import case
from specbisect.report.scrub import Scrubber
from specbisect.trace import Failure

PLANTED = {
    "user": "quillon",
    "host": "flintbox-7",
    "key": "tok-6c1f9a2b7d",
    "home": "/home/quillon",
    "other home": "/home/someoneelse/x",
    "mac": "/Users/marla.s/models",
    "windows": r"C:\Users\Marla\models",
    "cluster": "/data/nfs/home/marla/run",
    "bearer": "Bearer abcdef0123456789",
    "openai": "sk-abcdefghijklmnopqrstuvwx",
    "hugging face": "hf_abcdefghijklmnopqrstuv",
    "github": "ghp_abcdefghijklmnopqrstuvwxyz0123",
    "basic": "https://marla:pa55word@example.org/x",
    "flag": "--api-key s3cr3tvalue",
}
SECRETS = ("quillon", "flintbox", "6c1f9a2b7d", "someoneelse", "marla", "Marla", "abcdef0123456789")
SECRETS += ("abcdefghijklmnop", "pa55word", "s3cr3tvalue", "/home/", "private-value")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Scrubber:
    """A scrubber on a machine with a user, a host and a key."""
    monkeypatch.setattr("getpass.getuser", lambda: PLANTED["user"])
    monkeypatch.setattr("socket.gethostname", lambda: PLANTED["host"])
    monkeypatch.setattr(Path, "home", lambda: Path(PLANTED["home"]))
    monkeypatch.setitem(os.environ, "SOME_API_KEY", PLANTED["key"])
    return Scrubber.of_this_machine()


@pytest.mark.parametrize("what", PLANTED)
def test_it_is_taken_out(what: str, here: Scrubber) -> None:
    found = here.text(f"cannot open '{PLANTED[what]}': no such file")
    assert not [secret for secret in SECRETS if secret in found]
    assert found.startswith("cannot open '")
    assert found.endswith("': no such file")


def test_what_says_nothing_stays(here: Scrubber) -> None:
    plain = "root cause: token 12 of /usr/lib/x.so, n_ubatch = 8, sha256 " + "a" * 64
    assert here.text(plain) == plain


def test_only_variables_that_change_results_stay(here: Scrubber) -> None:
    found = here.walk({"variables": {"GGML_X": "1", "LLAMA_API_KEY": "private-value", "PATH": "/"}})
    assert found == {"variables": {"GGML_X": "1"}}


def test_no_file_of_a_report_has_any(here: Scrubber) -> None:
    everything = " ".join(PLANTED.values())
    found = finding(text=f"a prompt about {everything}")
    spoiled = dict(found.speculative.provenance)
    spoiled["host"] = spoiled["host"] | {
        "variables": {"GGML_PATH": "/home/quillon/x", "LLAMA_TOKEN": "private-value", "HOME": "/h"},
        "cpu": f"CPU of {PLANTED['host']}",
    }
    object.__setattr__(found.speculative, "provenance", spoiled)
    failed = found.model_copy(
        update={
            "summary": everything,
            "evidence": tuple(
                e.model_copy(update={"run": everything, "data": {"log": everything}})
                for e in found.evidence
            ),
            "vanilla": Failure("load", everything, (everything,)),
        }
    )
    for whole in (found, failed):
        for name, text in case.files(whole, scrubber=here).items():
            assert not [secret for secret in SECRETS if secret in text], name
