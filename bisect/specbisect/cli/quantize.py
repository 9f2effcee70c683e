"""``specbisect quantize``: make quantisations of a model, once, into the cache."""

from pathlib import Path
from typing import Any

import click

from specbisect.cli import options, output


@click.command("quantize")
@click.argument("base", type=options.PATH)
@click.argument("types", metavar="TYPE…", nargs=-1, required=True)
@click.option("-o", "--output", "directory", type=options.PATH, help="Put the files here too.")
@options.as_json
def command(base: Path, types: tuple[str, ...], directory: Path | None, as_json: bool) -> None:
    """Make quantisations of BASE, such as Q8_0.

    They are made once, into the cache. Prints where they are and which tensor types are really in them: a row whose
    length does not allow a type falls back to another one, as in llama.cpp.
    """
    from specbisect.cli.run import make
    from specbisect.llama import files, quantize

    own = files.inspect(base).file_type
    recipes = {name.upper(): quantize.recipe(base, name) for name in types if name.upper() != own}
    missing = [recipe for recipe in recipes.values() if not recipe.path.exists()]
    sizes = quantize.sizes(missing)
    quantize.check_space(sum(sizes))
    make(list(zip(missing, sizes, strict=True)))
    made: list[dict[str, Any]] = []
    for name in dict.fromkeys(map(str.upper, types)):
        path = recipes[name].path if name in recipes else base
        if directory:
            path = quantize.place(path, directory)
        facts = files.inspect(path)
        made.append(
            {
                "type": name,
                "path": str(path),
                "bytes": facts.size,
                "sha256": facts.sha256,
                "tensor_types": facts.tensor_types,
            }
        )
    if as_json:
        output.emit({"schema": "specbisect.quantize/1", "base": str(base), "files": made})
        return
    for file in made:
        counts = ", ".join(f"{n} {kind}" for kind, n in file["tensor_types"].items())
        click.echo(f"{file['path']}  {output.mebibytes(file['bytes'])}: {counts}")
