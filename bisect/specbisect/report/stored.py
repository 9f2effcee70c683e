"""What a run directory has of a case's diagnosis and narrowing."""

from collections.abc import Sequence

from pydantic import ValidationError

from specbisect.diagnose.finding import Finding
from specbisect.errors import BadInput
from specbisect.narrow.result import Narrowed
from specbisect.store import Store

_NARROWED = '"specbisect.narrowed/'
_HEAD = 80  # `schema` is the first field of either


def latest(store: Store, key: str) -> tuple[Finding, Narrowed | None]:
    """The latest finding of the case with this key, and what narrowing it came to, if it was narrowed.

    Raises `BadInput` when the case was not diagnosed, or by another version.
    """
    texts = store.findings(key)
    narrowed = [t for t in texts if _NARROWED in t[:_HEAD]]
    findings = [t for t in texts if _NARROWED not in t[:_HEAD]]
    if not findings:
        raise BadInput(
            f"case {key} has no finding yet; run `specbisect diagnose {store.path} --case {key[:8]}`"
        )
    try:
        return Finding.model_validate_json(findings[-1]), _last(narrowed)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadInput(
            f"the finding of case {key} is another version's ({where}: {first['msg']}); diagnose it again"
        ) from None


def _last(texts: Sequence[str]) -> Narrowed | None:
    return Narrowed.model_validate_json(texts[-1]) if texts else None
