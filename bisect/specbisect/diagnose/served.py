"""Cases of the server and the binding: what surrounds them, and in which layer of the stack a difference lives.

Neither shows its logits the way libllama does, so the experiments change what is around the case (the requests before
it, the requests beside it) and then run the same case, with the same drafts, straight over the C API. Where that shows
the same, the difference lives in libllama or below and is examined there, bit for bit.
"""

from dataclasses import replace
from typing import Any, Protocol

from specbisect import stage
from specbisect.cell import DRAFTER_ENGINES, Case
from specbisect.compare import compare
from specbisect.diagnose.casefile import CaseFile
from specbisect.diagnose.conclusion import Conclusion, Options
from specbisect.diagnose.examine import examine
from specbisect.diagnose.finding import Finding, Label
from specbisect.diagnose.lab import scripted
from specbisect.diagnose.together import Ids, after_each_other, in_one_batch
from specbisect.engines import engine
from specbisect.engines.libllama import LibLlama
from specbisect.engines.scenario import (
    ALONE,
    COLD,
    INTERLEAVED,
    REPEATED,
    SHORTENED,
    Played,
    Scenario,
    ids_of,
)
from specbisect.trace import Trace

HISTORIES = {"three times": REPEATED, "A-B-A": INTERLEAVED, "long then short": SHORTENED}
ONLY: dict[str, Label] = {"server": "server-only", "binding": "binding-only"}


class Stage(Protocol):
    """An engine that can play a case among other requests."""

    def play(self, case: Case, scenario: Scenario) -> Played:
        """The case as the last request of a scenario."""


class Surroundings(CaseFile):
    """Experiments on a case of the server or the binding."""

    def __init__(
        self, libllama: LibLlama, case: Case, vanilla: Trace, speculative: Trace, options: Options
    ) -> None:
        super().__init__(libllama, _twin(case, vanilla), vanilla, speculative, options)
        self.served = case
        stage_of_case: Any = engine(case.cell.engine)
        self.stage: Stage = stage_of_case

    def conclude(self) -> Conclusion | Finding:
        """The first label an experiment earns; a whole finding where the case is examined in libllama."""
        if not self.speculative.drafted:
            self.note(
                "engagement", "count drafted tokens", "nothing was drafted in the whole answer"
            )
            return Conclusion("not-engaged", "", "a drafter was asked for and nothing was drafted")
        cell = self.served.cell
        if found := self._repeat():
            return found
        if cell.cache_prompt and (found := self._prompt_cache()):
            return found
        if cell.n_parallel > 1 and (found := self._composition()):
            return found
        return self._layer()

    def _repeat(self) -> Conclusion | None:
        """Each arm again, by a process that has answered nothing yet."""
        for arm, case, original in (
            ("vanilla", self.served.vanilla, self.vanilla),
            ("speculative", self.served, self.speculative),
        ):
            stage.report(f"repeat {arm}")
            scenario = replace(Scenario.of(case.cell), fresh=True)
            again = [self._play(case, scenario).ids for _ in range(1 + self.options.repeats)]
            same = len({*again}) == 1
            said = "the same tokens" if same else "other tokens"
            self.note(
                f"repeat-{arm}",
                f"{len(again)} times, each on a new {case.cell.engine}",
                f"{said}{'' if again[0] == original.ids else '; others than in the run'}",
                equal=same,
                as_in_run=again[0] == original.ids,
            )
            if not same:
                return Conclusion(
                    "nondeterministic", arm, f"the {arm} arm differs from itself when repeated"
                )
        return None

    def _play(self, case: Case, scenario: Scenario) -> Trace:
        trace = self.stage.play(case, scenario).trace
        self.lab.counters += trace.counters
        return trace

    def _prompt_cache(self) -> Conclusion | None:
        """The vanilla arm on a new process against the same after other requests."""
        stage.report("prompt cache")
        case = self.served.vanilla
        cold = self._play(case, COLD)
        for name, history in HISTORIES.items():
            warm = self._play(case, replace(history, fresh=True))
            fork = compare(cold, warm).fork
            said = "the same tokens" if fork is None else f"other tokens from {fork} on"
            cached = warm.resolved.get(case.cell.engine, {}).get("cached")
            self.note(
                f"history {name}",
                "the request after others, against a cold one",
                f"{said}; {cached} prompt tokens came from the cache",
                fork=fork,
                cached=cached,
            )
            if fork is not None:
                return self._cache_cause(name, history, warm, fork)
        return None

    def _cache_cause(self, name: str, history: Scenario, warm: Trace, fork: int) -> Conclusion:
        prompt = warm.prompt_ids
        tokenize = self.lab.model.vocab.tokenize
        requests = [*(ids_of(before, prompt, tokenize) for before in history.history), prompt]
        again = after_each_other(self.lab, requests)
        numeric = again == warm.ids
        self.note(
            "cache-replay",
            "the same requests over the C API, the shared prefix kept and the rest evaluated",
            "the same tokens" if numeric else "other tokens",
            equal=numeric,
        )
        kind = "numeric" if numeric else "state"
        why = (
            "the rest of the prompt is evaluated at another width"
            if numeric
            else "the C API alone does not show it: what the cache holds is not what it should hold"
        )
        return Conclusion(
            "prompt-cache", kind, f"only with reuse ({name}): other tokens from {fork} on; {why}"
        )

    def _composition(self) -> Conclusion | None:
        """The vanilla arm alone against the same beside companions, and beside others of the same lengths."""
        stage.report("composition")
        case = self.served.vanilla
        alone = self._play(case, replace(ALONE, fresh=True))
        scenario = Scenario.of(case.cell)
        played = self.stage.play(case, replace(scenario, fresh=True))
        fork = compare(alone, played.trace).fork
        said = "the same tokens" if fork is None else f"other tokens from {fork} on"
        n = len(scenario.companions)
        self.note("beside", f"the request beside {n} others, against alone", said, fork=fork)
        if fork is None:
            return None
        if played.contamination:
            words = ", ".join(played.contamination)
            return Conclusion(
                "cross-sequence", "text", f"words of another request are in the answer: {words}"
            )
        return self._composition_cause(played, scenario, fork)

    def _composition_cause(self, played: Played, scenario: Scenario, fork: int) -> Conclusion:
        prompt = played.trace.prompt_ids
        tokenize = self.lab.model.vocab.tokenize
        beside = [ids_of(companion, prompt, tokenize) for companion in scenario.companions]
        answers, rows = in_one_batch(self.lab, [prompt, *beside])
        _, others = in_one_batch(self.lab, [prompt, *map(_other_content, beside)])
        n = min(len(rows), len(others))
        same_tokens, same_bits = answers[0] == played.trace.ids, rows[:n] == others[:n]
        self.note(
            "composition-replay",
            "the same requests in one batch over the C API; and with other content of the same lengths",
            f"{'the same' if same_tokens else 'other'} tokens as the server; "
            f"{'the same' if same_bits else 'other'} bits with other content in {n} tokens",
            same_tokens=same_tokens,
            same_bits=same_bits,
        )
        said = f"only beside other sequences: other tokens from {fork} on"
        if not same_bits:
            return Conclusion(
                "cross-sequence", "content", f"{said}; they depend on what the others say"
            )
        kind = "numeric" if same_tokens else "unsettled"
        return Conclusion(
            "batch-composition",
            kind,
            f"{said}; the content of the others does not matter, only their number",
        )

    def _layer(self) -> Conclusion | Finding:
        """The same case, with the same drafts, in libllama."""
        stage.report("layer")
        twin = self.case
        if self.speculative.cycles:
            twin = scripted(twin, self.speculative)
        elif (
            twin.cell.drafter is None or "libllama" not in DRAFTER_ENGINES[twin.cell.drafter.method]
        ):
            return Conclusion(
                "unexplained",
                "layer",
                "the server does not show its drafts, so they cannot be replayed",
            )
        vanilla, speculative = self.lab.run(twin.vanilla), self.lab.run(twin)
        name = self.served.cell.engine
        same = (vanilla.ids, speculative.ids) == (self.vanilla.ids, self.speculative.ids)
        here, there = self.verdict.fork, compare(vanilla, speculative).fork
        self.note(
            "layer",
            f"the same prompt, drafts and settings in libllama, against {name}",
            f"{'the same' if same else 'other'} tokens in both arms; forks {here} and {there}",
            same=same,
            fork=here,
            libllama_fork=there,
        )
        if here != there:
            return Conclusion(
                ONLY[name], "", f"{name} forks at {here}, libllama at {there}: it lives in {name}"
            )
        return examine(self.lab.engine, twin, vanilla, speculative, self.options)


def _twin(case: Case, vanilla: Trace) -> Case:
    """The case as libllama runs it: flash attention as it was resolved, nothing cached, nobody beside."""
    flash = vanilla.resolved.get("target", {}).get("flash_attn", case.cell.flash_attn)
    cell = replace(case.cell, engine="libllama", cache_prompt=False, n_parallel=1, flash_attn=flash)
    return replace(case, cell=cell, prompt=replace(case.prompt, ids=vanilla.prompt_ids))


def _other_content(ids: Ids) -> Ids:
    """As many tokens that say something else."""
    return (*ids[:1], *reversed(ids[1:]))


def examine_served(
    libllama: LibLlama, case: Case, vanilla: Trace, speculative: Trace, options: Options
) -> Finding:
    """The finding on one case of the server or the binding."""
    surroundings = Surroundings(libllama, case, vanilla, speculative, options)
    found = surroundings.conclude()
    inner = found.evidence if isinstance(found, Finding) else ()
    summary = found.summary
    if isinstance(found, Finding) and found.label != "none":
        summary = f"not the {case.cell.engine}'s: libllama shows the same; {summary}"
    return Finding(
        case=case,
        verdict=surroundings.verdict,
        label=found.label,
        kind=found.kind,
        summary=summary,
        evidence=(*surroundings.evidence, *inner),
        vanilla=vanilla,
        speculative=speculative,
        counters=surroundings.lab.counters,
    )
