"""`debug.dump_dir`: each piece's FX source, and what Inductor generated for it.

In: pieces, compiled or loaded. Out: files. Knows nothing of where pieces come from.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from pcgsvc.config import Compiler, Config
from pcgsvc.program.image import ProgramImage
from pcgsvc.program.pieces import Piece
from pcgsvc.program.program import CompiledPiece
from pcgsvc.trace.rows import Document, python_of

logger = logging.getLogger(__name__)


def dump_source(piece: Piece, size: int | None, config: Config) -> Path | None:
    """Write a piece's FX source; return the file that its compiler writes to, or None.

    `size`: the only row count that it is compiled for; None: any.
    """
    if config.debug.dump_dir is None or piece.document is None:
        return None
    folder = Path(config.debug.dump_dir)
    _dump_document(folder, piece.name, piece.document)
    return _generated_path(folder, piece.name, size)


def dump_loaded(
    image: ProgramImage,
    pieces: Mapping[str, CompiledPiece],
    specialized: Mapping[int, Mapping[str, CompiledPiece]],
    config: Config,
) -> None:
    """Write of loaded pieces what a cold start writes."""
    if config.debug.dump_dir is None:
        return
    folder = Path(config.debug.dump_dir)
    names = {s.piece: s.name for s in reversed(image.spec.steps) if s.piece is not None}
    for key, document in image.documents.items():
        _dump_document(folder, names[key], document)
    if config.compiler.name is not Compiler.INDUCTOR:
        return
    for size, group in [(None, pieces), *specialized.items()]:
        for key, piece in group.items():
            _dump_generated(_generated_path(folder, names[key], size), piece)


def _dump_document(folder: Path, name: str, document: Document) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.fx.py").write_text(python_of(document, "piece"))


def _generated_path(folder: Path, name: str, size: int | None) -> Path:
    suffix = "" if size is None else f".size_{size}"
    return folder / f"{name}{suffix}.inductor.py"


def _dump_generated(path: Path, piece: CompiledPiece) -> None:
    from pcgsvc.compilers.inductor import InductorPiece

    try:
        if isinstance(piece, InductorPiece):
            path.write_text(piece.generated())
    except Exception as error:  # noqa: BLE001 - torch's artifact format is young
        words = f"{type(error).__name__}: {error}"
        logger.warning("debug.dump_dir: %s cannot be written: %s", path.name, words)
