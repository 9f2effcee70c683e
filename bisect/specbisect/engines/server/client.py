"""Requests to a llama-server, and what counts as an answer.

Every fault is an `EngineFault` with one line. Field names are those of llama.cpp's tools/server.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import httpx

from specbisect.cell import Cell
from specbisect.errors import EngineFault
from specbisect.trace import Finish

STAGE = "request"
_SHOWN = 120

NEUTRAL: Mapping[str, Any] = {
    "temperature": 0.0,
    "top_k": 1,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_n_sigma": -1.0,
    "typical_p": 1.0,
    "xtc_probability": 0.0,
    "dynatemp_range": 0.0,
    "repeat_last_n": 0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "n_probs": 0,
    "backend_sampling": False,
    "samplers": ["top_k", "temperature"],
}
"""Greedy decoding: the largest logit, and nothing that could change it. The server says in its answer what it used."""


class Disconnected(EngineFault):
    """The server ended the connection, most likely because it ended itself."""


class Refused(EngineFault):
    """The server answered that it will not do what it was asked; nothing is wrong with the server."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion: what was generated, and the server's own account of it. Times in seconds."""

    ids: tuple[int, ...]
    finish: Finish
    slot: int
    drafted: int
    accepted: int
    cached: int
    evaluated: int
    prompt_s: float
    generate_s: float
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class About:
    """What a server says of itself. `model` is what tells its model from another; no path of its machine."""

    build: str
    total_slots: int
    n_ctx: int
    n_vocab: int
    model: Mapping[str, Any]


class Client:
    """Talks to one server.

    `loopback` servers are spoken to directly; for others, the proxies of the environment count.
    """

    def __init__(self, url: str, key: str, *, seconds: float, loopback: bool) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(seconds, connect=min(10.0, seconds))
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=timeout, trust_env=not loopback
        )
        self.seconds = seconds

    def healthy(self) -> bool:
        """Whether the server has loaded its model. Raises `EngineFault` when what answers is no llama-server."""
        response = self._send("GET", "/health", None)
        return response.status_code != httpx.codes.SERVICE_UNAVAILABLE and bool(_json(response))

    def get(self, path: str) -> Any:
        """The JSON at `path`."""
        return _json(self._send("GET", path, None))

    def about(self) -> About:
        """What the server says of itself. Raises `EngineFault` when it is no llama-server."""
        props, models = self.get("/props"), self.get("/v1/models")
        try:
            meta = models["data"][0]["meta"]
            name = PurePath(props["model_path"].replace("\\", "/")).name
            return About(
                build=str(props["build_info"]),
                total_slots=int(props["total_slots"]),
                n_ctx=int(props["default_generation_settings"]["n_ctx"]),
                n_vocab=int(meta["n_vocab"]),
                model={"name": name, "n_params": meta["n_params"], "size": meta["size"]},
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineFault(
                STAGE, f"/props and /v1/models do not say what is needed: {error}"
            ) from None

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`, with BOS where the vocabulary wants it."""
        body = {"content": text, "add_special": True, "parse_special": True}
        return tuple(_json(self._send("POST", "/tokenize", body)).get("tokens", ()))

    def pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The bytes of each token, one latin-1 character each; nothing is tokenised again."""
        body = {"content": list(ids), "with_pieces": True}
        found = _json(self._send("POST", "/tokenize", body)).get("tokens", ())
        if [entry.get("id") for entry in found if isinstance(entry, dict)] != list(ids):
            return ()
        return tuple(_bytes(entry["piece"]).decode("latin-1") for entry in found)

    def complete(
        self, cell: Cell, prompts: Sequence[Sequence[int]], slot: int | None
    ) -> list[Answer]:
        """Greedy completions of `prompts`, handed over at once so that they are decoded together.

        Raises `EngineFault` when the server fails, or when its account of what it did does not add up.
        """
        body = _request(cell, prompts)
        if slot is not None:
            body["id_slot"] = slot
        answered = _json(self._send("POST", "/completion", body))
        found = [answered] if isinstance(answered, dict) else answered
        if len(found) != len(prompts):
            raise EngineFault(STAGE, f"{len(found)} answers to {len(prompts)} prompts")
        if len(found) > 1:
            found = sorted(found, key=lambda one: one.get("index", 0))
        return [_answer(one, p, cell) for one, p in zip(found, prompts, strict=True)]

    def stream(self, cell: Cell, prompt: Sequence[int]) -> Iterator[int]:
        """A greedy completion of `prompt` as it comes: each time, how many tokens came.

        The server keeps back what is no whole character yet; such tokens are counted with the last ones. Raises
        `Refused` when the server will not have it, `EngineFault` when it fails.
        """
        body = _request(cell, [prompt]) | {"stream": True}
        once = {
            "Connection": "close"
        }  # the server may close what was used for a stream at any moment
        counted = 0
        with (
            _faults("/completion", self.seconds),
            self._http.stream("POST", "/completion", json=body, headers=once) as response,
        ):
            if response.is_error:
                response.read()
                _json(response)
            for line in response.iter_lines():
                name, _, data = line.partition(": ")
                if name == "error":
                    raise EngineFault(STAGE, f"/completion ended with an error: {_line(data)}")
                if name == "data":
                    event = json.loads(data)
                    count = len(event.get("tokens", ()))
                    if event.get("stop"):
                        count = event["tokens_predicted"] - counted
                    counted += count
                    yield count

    def _send(self, method: str, path: str, body: Any) -> httpx.Response:
        with _faults(path, self.seconds):
            return self._http.request(method, path, json=body)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


@contextmanager
def _faults(path: str, seconds: float) -> Iterator[None]:
    """What a connection can do to us, as an `EngineFault`."""
    try:
        yield
    except httpx.TimeoutException:
        raise EngineFault(STAGE, f"{path} did not answer within {seconds:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Disconnected(STAGE, f"{path}: {error or type(error).__name__}") from None


def _request(cell: Cell, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The body that asks for greedy completions."""
    return dict(NEUTRAL) | {
        "prompt": list(prompts[0]) if len(prompts) == 1 else [list(p) for p in prompts],
        "n_predict": cell.n_predict,
        "seed": cell.seed,
        "ignore_eos": cell.ignore_eos,
        "cache_prompt": cell.cache_prompt,
        "return_tokens": True,
        "stream": False,
    }


def _json(response: httpx.Response) -> Any:
    where = response.request.url.path
    try:
        value = response.json()
    except ValueError:
        kind = response.headers.get("content-type", "no content type").split(";")[0]
        said = _line(response.text)
        raise EngineFault(
            STAGE,
            f"{where} answered HTTP {response.status_code} with {kind} instead of JSON: {said}",
        ) from None
    if response.is_error:
        error = value.get("error", value) if isinstance(value, dict) else value
        message = error.get("message", error) if isinstance(error, dict) else error
        kind = Refused if response.is_client_error else EngineFault
        raise kind(STAGE, f"{where} answered HTTP {response.status_code}: {_line(str(message))}")
    return value


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"


def _bytes(piece: str | Sequence[int]) -> bytes:
    return piece.encode() if isinstance(piece, str) else bytes(piece)


def _answer(raw: Any, prompt: Sequence[int], cell: Cell) -> Answer:
    try:
        ids, timings = tuple(map(int, raw["tokens"])), raw["timings"]
        says, evaluated = int(raw["tokens_predicted"]), int(raw["tokens_evaluated"])
        stop, truncated = str(raw["stop_type"]), bool(raw["truncated"])
        answer = Answer(
            ids=ids,
            finish=_finish(stop, truncated, len(ids), cell.n_predict),
            slot=int(raw["id_slot"]),
            drafted=int(timings.get("draft_n", 0)),
            accepted=int(timings.get("draft_n_accepted", 0)),
            cached=int(timings.get("cache_n", 0)),
            evaluated=int(timings["prompt_n"]),
            prompt_s=float(timings["prompt_ms"]) / 1000,
            generate_s=float(timings["predicted_ms"]) / 1000,
            settings=raw["generation_settings"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineFault(
            STAGE, f"/completion answered without what is needed: {type(error).__name__} {error}"
        ) from None
    if len(ids) != says:
        raise EngineFault(STAGE, f"the server returned {len(ids)} tokens and says it made {says}")
    if evaluated != len(prompt):
        raise EngineFault(
            STAGE, f"the server evaluated {evaluated} prompt tokens, {len(prompt)} were sent"
        )
    return answer


def _finish(stop: str, truncated: bool, n: int, n_predict: int) -> Finish:
    """Why generation ended. Raises `EngineFault` for a reason there was no request for."""
    if n > n_predict:
        raise EngineFault(STAGE, f"the server returned {n} tokens, {n_predict} were asked for")
    if stop == "eos":
        return "eog"
    if stop != "limit":
        raise EngineFault(
            STAGE, f"the server stopped for the reason {stop!r}, which was not asked for"
        )
    if n == n_predict:
        return "length"
    if truncated:
        return "context"
    raise EngineFault(STAGE, f"the server returned {n} tokens, {n_predict} were asked for")
