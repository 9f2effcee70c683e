"""Where calls run: in child processes here, or on the workers of a Dask cluster."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from specbisect.cli import output
from specbisect.errors import BadInput

if TYPE_CHECKING:
    from specbisect.cluster.client import Cluster
    from specbisect.workers import Workers


@dataclass(frozen=True, slots=True)
class Where:
    """The scheduler of a cluster, where models lie on its workers, and what each call takes of their resources."""

    scheduler: str
    maps: tuple[tuple[str, str], ...] = ()
    resources: Mapping[str, float] | None = None


def opened(jobs: int, timeout: float | None, where: Where | None) -> "Workers | Cluster":
    """A context manager that takes calls. Raises `BadInput` when the cluster cannot be used."""
    from specbisect.workers import Workers

    return Workers(jobs, timeout) if where is None else _connected(where, timeout)


def _connected(where: Where, timeout: float | None = None) -> "Cluster":
    try:
        from specbisect.cluster.client import Cluster
    except ModuleNotFoundError as error:
        raise BadInput(
            f"--scheduler needs {error.name}; install it with pip install 'specbisect[cluster]'"
        ) from None
    return Cluster(
        where.scheduler,
        timeout,
        maps=where.maps,
        resources=where.resources,
        note=output.note,
    )


def check_cluster(where: Where | None) -> None:
    """Raises `BadInput` when cases are to run on a cluster that cannot be used."""
    if where is not None:
        with _connected(where):
            pass


def asking(where: Where | None) -> Callable[..., Any]:
    """What calls a function in a process of its own where cases run, and gives its answer.

    On a cluster, every worker is asked, and it raises `BadInput` when not all answers are the same.
    """
    from specbisect.llama import child
    from specbisect.store.directory import differences

    def ask(function: Callable[..., Any], *args: object) -> Any:
        assert where is not None
        with _connected(where) as cluster:
            (one, answer), *others = cluster.everywhere(function, *args).items()
        for address, other in others:
            if line := next(differences(answer, other), None):
                raise BadInput(
                    f"workers {one} and {address} are not alike ({line}), and one verdict is about one kind of host; "
                    "stop one of them"
                )
        return answer

    return child.call if where is None else ask


def check_hosts(asked: Iterable[str], where: Where | None) -> None:
    """Raises `BadInput` when a class of hosts is `asked` for that this machine is not of, and there is no cluster."""
    for name in sorted({*asked} - {""}):
        if where is None and name != (own := _own_class()):
            raise BadInput(
                f"host_class = {name!r} is not this machine's, which is {own!r}; give the --scheduler of a cluster "
                f"with such hosts, or set SPECBISECT_HOST_CLASS={name} if this is one"
            )


@functools.cache
def _own_class() -> str:
    from specbisect.llama import child, library

    return child.call(library.host_class)


def cluster(command: Callable[..., Any]) -> Any:
    """Options about a cluster; the command gets them as `where`, None when there is to be none."""

    @functools.wraps(command)
    def with_where(
        *,
        scheduler: str | None,
        maps: tuple[str, ...],
        resources: tuple[str, ...],
        **given: Any,
    ) -> Any:
        if scheduler is None:
            for option, words in (("--on-workers", maps), ("--resource", resources)):
                if words:
                    raise BadInput(f"{option} is about a cluster; give its --scheduler")
            return command(where=None, **given)
        return command(where=_where(scheduler, maps, resources), **given)

    options = (
        click.option(
            "--scheduler",
            metavar="ADDRESS",
            help="Run on the Dask cluster with this scheduler, such as tcp://host:8786; --jobs has no effect.",
        ),
        click.option(
            "--on-workers",
            "maps",
            multiple=True,
            metavar="HERE=THERE",
            help="Models below the directory HERE lie below THERE on the workers.",
        ),
        click.option(
            "--resource",
            "resources",
            multiple=True,
            metavar="NAME=AMOUNT",
            help="What each call takes of a worker's resources, such as GPU=1.",
        ),
    )
    for option in reversed(options):
        with_where = option(with_where)
    return with_where


def _where(scheduler: str, maps: tuple[str, ...], resources: tuple[str, ...]) -> Where:
    taken = {}
    for name, value in (_pair(word, "--resource", "GPU=1") for word in resources):
        try:
            taken[name] = float(value)
        except ValueError:
            raise BadInput(f"--resource {name}={value}: write a number, such as GPU=1") from None
        if taken[name] <= 0:
            raise BadInput(f"--resource {name}={value}: a call takes more than nothing")
    places = tuple(_pair(word, "--on-workers", "/models=/srv/models") for word in maps)
    return Where(scheduler, places, taken)


def _pair(word: str, option: str, example: str) -> tuple[str, str]:
    name, sign, value = word.partition("=")
    if not (name and sign and value):
        raise BadInput(f"{option} {word}: write it like {example}")
    return name, value
