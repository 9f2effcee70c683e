"""A llama-server without a model: answers like the real one, or misbehaves as FAKE_SERVER says.

Its generated ids count upwards from the length of the prompt; a speculative one drafts `n_max` of them and gets the
last one wrong. Every process leaves a file named by its pid in FAKE_PIDS.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MODE = os.environ.get("FAKE_SERVER", "")
SPEC_TYPES = (
    "none,draft-simple,draft-eagle3,draft-mtp,draft-dflash,draft-dspark,"
    "ngram-simple,ngram-map-k,ngram-map-k4v,ngram-mod,ngram-cache"
)
FLAGS = """--model --ctx-size --batch-size --ubatch-size --parallel --threads --threads-batch --flash-attn --swa-full
--cache-type-k --cache-type-v --split-mode --seed --n-gpu-layers --kv-unified --no-kv-unified --no-op-offload
--no-repack --spec-draft-model --spec-draft-n-max --spec-draft-n-min --spec-draft-p-min --spec-draft-type-k
--spec-draft-type-v --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits
--spec-ngram-mod-n-min --verbosity --no-warmup --fit --cache-ram --host --port"""


def say(text: str | bytes) -> None:
    """One line of log."""
    os.write(2, (text if isinstance(text, bytes) else text.encode()) + b"\n")


def option(name: str, default: str = "") -> str:
    """The value behind a flag."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def slot(text: str, number: int = 0) -> None:
    """One line of log about a slot."""
    say(f"0.00.012.345 D slot   operator(): id  {number} | task 7 | {text}")


def generate(prompt: list[int], n: int) -> tuple[list[int], int, int]:
    """Ids, and how many were drafted and accepted; logs the cycles."""
    ids = [len(prompt) + i for i in range(n)]
    n_max = int(option("--spec-draft-n-max", "0")) if "--spec-type" in sys.argv else 0
    drafted = accepted = 0
    at = 0
    while at + 1 < n:
        base = len(prompt) + at
        width = min(n_max, n - at - 2)
        if width > 0:
            draft = [*ids[at + 1 : at + width], 0]
            for i, token in enumerate(draft):
                say(
                    f"D spec        draft:  - seq_id 0, draft candidate   0, pos {i:3}: {token:6} (   0.900) 'x'"
                )
                say(
                    f"D spec        draft:  - seq_id 0, draft candidate   1, pos {i:3}: {token + 1:6} (   0.010) 'y'"
                )
            slot(f"generate_draft: id={ids[at]}, #tokens={base}, #draft={width}, pos_next={base}")
            slot(
                f"add accepted tokens: sampled={ids[at + width]}, ids.size={width}, n_draft={width}"
            )
            drafted, accepted, at = drafted + width, accepted + width - 1, at + width
        else:
            slot(f"slot decode token, id={ids[at]}, n_ctx = 2048, n_tokens = {base}, truncated = 0")
            at += 1
    return ids, drafted, accepted


def complete(body: dict, prompt: list[int], index: int) -> dict:
    """The answer to one prompt."""
    n = body["n_predict"]
    ids, drafted, accepted = generate(prompt, n)
    if MODE == "few":
        ids = ids[:-2]
    if MODE == "many":
        ids = [*ids, 9]
    if MODE == "eog":
        ids = ids[:3]
    draft = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
    if drafted:
        slot(f"     acc per pos = ({', '.join(['1.000'] * 2 + ['0.000'])})")
    if MODE == "bytes":
        say(b"D slot process_token: id  0 | task 7 | next token: '\xf0\x9f' \xff\xfe")
    number = index if MODE == "slots" else 0
    slot("stop processing: n_tokens = 9, truncated = 0", number)
    names = (
        "temperature",
        "top_k",
        "min_p",
        "samplers",
        "ignore_eos",
        "n_predict",
        "repeat_penalty",
    )
    settings = {name: body[name] for name in names}
    if MODE == "warm":
        settings["temperature"] = 0.8
    return {
        "index": index,
        "content": "",
        "tokens": ids,
        "id_slot": number,
        "stop": True,
        "tokens_predicted": len(ids) + (MODE == "miscount"),
        "tokens_evaluated": len(prompt) + (MODE == "bos"),
        "generation_settings": settings
        | {"speculative.types": "none," + option("--spec-type", "none")},
        "truncated": MODE == "context",
        "stop_type": {"eog": "eos", "word": "word"}.get(MODE, "limit"),
        "timings": {"cache_n": 0, "prompt_n": len(prompt), "prompt_ms": 1.0, "predicted_ms": 2.0}
        | draft,
    }


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def answer(self, value: object, status: int = 200, kind: str = "application/json") -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refused(self) -> bool:
        key = os.environ.get("LLAMA_API_KEY", "")
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self.answer({"error": {"message": "Invalid API Key"}}, 401)
            return True
        return False

    def do_GET(self) -> None:
        if MODE == "page":
            self.answer(b"<!DOCTYPE html><title>Welcome</title>", kind="text/html; charset=utf-8")
        elif self.path == "/health":
            loading = MODE == "loading"
            self.answer(
                {"error": {"message": "Loading model"}} if loading else {"status": "ok"},
                503 if loading else 200,
            )
        elif self.refused():
            return
        elif self.path == "/props":
            self.answer(
                {
                    "build_info": "b1-fake",
                    "total_slots": int(option("--parallel", "4")),
                    "model_path": "/home/somebody/models/tiny.gguf",
                    "default_generation_settings": {"n_ctx": 2048},
                }
            )
        elif self.path == "/v1/models":
            self.answer({"data": [{"meta": {"n_params": 7, "size": 14, "n_vocab": 512}}]})
        elif self.path == "/slots":
            self.answer([{"is_processing": True, "next_token": [{"n_decoded": 5}]}])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        if self.path == "/tokenize":
            content = body["content"]
            if isinstance(content, str):
                self.answer({"tokens": [1, *content.encode()]})
            else:
                self.answer(
                    {
                        "tokens": [
                            {"id": i, "piece": f"<{i}>" if i % 2 else [255, i % 256]}
                            for i in content
                        ]
                    }
                )
        elif MODE == "html":
            self.answer(b"<html>\n<body>502 Bad Gateway</body></html>", kind="text/html")
        elif MODE == "error":
            self.answer({"error": {"code": 500, "message": "Compute error.\nsecond line"}}, 500)
        elif MODE == "refuse":
            self.answer(
                {"error": {"code": 400, "message": "request exceeds the context size"}}, 400
            )
        elif MODE == "hang":
            time.sleep(3600)
        elif MODE == "abort":
            say("/home/me/llama.cpp/ggml.c:123: GGML_ASSERT(n_tokens <= n_batch) failed")
            os.kill(os.getpid(), signal.SIGABRT)
        elif MODE == "shape":
            self.answer({"choices": []})
        else:
            prompts = body["prompt"]
            if isinstance(prompts[0], int):
                self.answer(complete(body, prompts, 0))
            else:
                self.answer([complete(body, p, i) for i, p in reversed(list(enumerate(prompts)))])


def main() -> None:
    if "--version" in sys.argv:
        say("version: 1 (fake)")
        return
    if "--help" in sys.argv:
        say(f"{FLAGS}\n--spec-type {SPEC_TYPES}   comma-separated list")
        return
    pids = os.environ.get("FAKE_PIDS")
    if pids:
        Path(pids, str(os.getpid())).write_text(" ".join(sys.argv[1:]))
    say("0.00.000.100 I llama_context: constructing llama_context")
    say(f"0.00.000.100 I llama_context: n_ctx                 = {option('--ctx-size', '2048')}")
    say(f"0.00.000.100 I llama_context: n_batch               = {option('--batch-size', '2048')}")
    say("0.00.000.100 I llama_context: flash_attn            = auto")
    say("0.00.000.100 I llama_context: Flash Attention enabled")
    if MODE == "start":
        say("error: failed to load model 'x.gguf'")
        sys.exit(1)
    if MODE == "undrafted":
        say(
            "E srv    load_model: failed to initialize speculative decoding context: vocab mismatch"
        )
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = ThreadingHTTPServer(
        (option("--host", "127.0.0.1"), int(option("--port", "0"))), Handler
    )
    say(
        f"0.00.000.200 I srv  llama_server: listening on http://127.0.0.1:{server.server_address[1]}"
    )
    threading.Thread(target=server.serve_forever).start()


if __name__ == "__main__":
    main()
