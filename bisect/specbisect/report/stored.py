"""What a run directory has of a case's diagnosis and narrowing."""

from pydantic import ValidationError

from specbisect.diagnose.finding import Finding
from specbisect.errors import BadInput
from specbisect.narrow.result import Narrowed
from specbisect.store import Store


def latest(store: Store, key: str) -> tuple[Finding, Narrowed | None]:
    """The latest finding of the case with this key, and what narrowing it came to, if it was narrowed.

    Raises `BadInput` when the case was not diagnosed, or by another version.
    """
    findings, narrowed = store.findings(key), store.kept(f"narrowed:{key}")
    if not findings:
        raise BadInput(
            f"case {key} has no finding yet; run `specbisect diagnose {store.path} --case {key[:8]}`"
        )
    try:
        finding = Finding.model_validate_json(findings[-1])
        return finding, Narrowed.model_validate_json(narrowed) if narrowed else None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadInput(
            f"what is known of case {key} is another version's ({where}: {first['msg']}); diagnose it again"
        ) from None
