"""The server engine: arms run on upstream's own ``llama-server``, over its HTTP interface.

One server per arm stays up between cases, so that a run whose cases are ordered by cell starts each distinct server
once, and the vanilla one survives while the drafters change.
"""

import atexit
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from specbisect import stage
from specbisect.cell import Case, Cell, DraftModel, SelfDraft, ServerSpec
from specbisect.engines.account import ids_as_asked
from specbisect.engines.scenario import Played, Scenario, ids_of
from specbisect.engines.server import binary, flags
from specbisect.engines.server.account import account
from specbisect.engines.server.client import Answer, Client, Refused
from specbisect.engines.server.process import External, Server
from specbisect.errors import BadInput, EngineFault
from specbisect.llama import files
from specbisect.trace import ArmName, Counters, Trace

URLS: Mapping[ArmName, str] = {
    "vanilla": "SPECBISECT_VANILLA_URL",
    "speculative": "SPECBISECT_SPECULATIVE_URL",
}
"""Environment variables with the URL of a server to use for an arm instead of starting one."""
KEY = "SPECBISECT_SERVER_KEY"
"""Environment variable with the API key of such servers."""

_STAGGER_POLL_S = 0.002

Ids = tuple[int, ...]
AnyServer = Server | External


class ServerEngine:
    """Runs arms on llama-servers; the last server of each arm is kept."""

    def __init__(self) -> None:
        self._servers: dict[ArmName, tuple[tuple[str, ...], AnyServer]] = {}
        self.starts = 0

    def run(self, case: Case) -> Trace:
        """One arm of `case`; with more than one slot, beside companions that fill the others."""
        return self.play(case, Scenario.of(case.cell)).trace

    def play(self, case: Case, scenario: Scenario) -> Played:
        """`case` as the last of the requests of `scenario`, and what came of its companions.

        Raises `BadInput` when it cannot be run as asked, `EngineFault` when the server fails.
        """
        began, starts = time.perf_counter(), self.starts
        cell = case.cell
        if len(scenario.companions) >= cell.n_parallel:
            raise BadInput(
                f"n_parallel = {cell.n_parallel} has no slot for {len(scenario.companions)} companions; raise it"
            )
        arm: ArmName = "vanilla" if cell.drafter is None else "speculative"
        if scenario.fresh:
            self._drop(arm)
        server = self._server(arm, cell)
        try:
            prompts, answers = _ask(server, case, scenario)
            pieces = [server.client.pieces(answer.ids) for answer in answers]
        except Refused:
            raise
        except EngineFault as fault:
            explained = server.explain(fault)
            self._drop(arm)
            raise explained from None
        trace, *companions = (
            account(cell, server, *one) for one in zip(prompts, answers, pieces, strict=True)
        )
        spent = Counters(
            model_loads=(self.starts - starts) * (1 + _drafts_by_model(cell)),
            total_s=time.perf_counter() - began,
        )
        return Played(replace(trace, counters=trace.counters + spent), tuple(companions))

    def _server(self, arm: ArmName, cell: Cell) -> AnyServer:
        """The server of `arm` for `cell`: the last one when it is the same and alive, else another in its place."""
        url = os.environ.get(URLS[arm])
        command = (url,) if url else flags.command(cell, binary.find())
        if arm in self._servers:
            known, server = self._servers[arm]
            if known == command and not server.ended():
                return server
            self._drop(arm)
        if url:
            server = External(url, os.environ.get(KEY, ""))
        else:
            for model in _models(cell):
                files.inspect(model)  # says what is wrong with a file better than a server does
            server = Server(command)
            self.starts += 1
        self._servers[arm] = command, server
        return server

    def _drop(self, arm: ArmName) -> None:
        if arm in self._servers:
            self._servers.pop(arm)[1].close()

    def close(self) -> None:
        """End every server that was started here. Idempotent."""
        for arm in tuple(self._servers):
            self._drop(arm)


def _ask(server: AnyServer, case: Case, scenario: Scenario) -> tuple[list[Ids], list[Answer]]:
    """Send the requests of `scenario`; prompts and answers of the case and its companions, in this order."""
    cell, client = case.cell, server.client
    prompt = ids_as_asked(case.prompt, client.tokenize, server.about.n_vocab)
    slot = 0 if isinstance(server, Server) else None
    for before in scenario.history:
        stage.report("history")
        server.attend()
        done = client.complete(cell, [ids_of(before, prompt, client.tokenize)], slot)
        server.heard(done[0].slot)
    beside = [ids_of(companion, prompt, client.tokenize) for companion in scenario.companions]
    server.attend()
    stage.report("request")
    if not beside:
        return [prompt], client.complete(cell, [prompt], slot)
    if not scenario.stagger:
        return [prompt, *beside], client.complete(cell, [prompt, *beside], None)
    with ThreadPoolExecutor(max_workers=1) as pool:
        others = pool.submit(client.complete, cell, beside, None)
        while not others.done() and not _under_way(client, len(beside), scenario.stagger):
            time.sleep(_STAGGER_POLL_S)
        own = client.complete(cell, [prompt], None)
        return [prompt, *beside], own + others.result()


def _under_way(client: Client, wanted: int, tokens: int) -> bool:
    """Whether that many slots have generated so many tokens of their running request."""
    slots = client.get("/slots")
    counts = [s["next_token"][0]["n_decoded"] for s in slots if s.get("is_processing")]
    return len(counts) >= wanted and min(counts) >= tokens


def _models(cell: Cell) -> list[str]:
    drafter = cell.drafter
    draft = drafter.model if isinstance(drafter, DraftModel | ServerSpec) else None
    return [cell.target.path, *([draft.path] if draft else [])]


def _drafts_by_model(cell: Cell) -> bool:
    return isinstance(cell.drafter, SelfDraft) or len(_models(cell)) > 1


def ready() -> None:
    """Raise `BadInput` when an arm has neither a running server nor a binary to start one from."""
    if not all(os.environ.get(name) for name in URLS.values()):
        binary.find()


def make() -> ServerEngine:
    """The engine, as the registry makes it; its servers end with this process at the latest."""
    made = ServerEngine()
    atexit.register(made.close)
    return made
