"""Where weights come from: the built-in model, a local folder, or a hub id - each becomes a folder or a hub id to load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serve_app.errors import ModelNotFoundError
from serve_app.models.builtin import BUILTIN_NAME, builtin_folder

BUILTIN = "builtin"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights and tokenizer that `from_pretrained` can read.

    Attributes:
        path: a local folder or a hub id.
        name: the name callers use by default.
        revision: commit, tag or branch of a hub id; None is the default branch.
    """

    path: str
    name: str
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        return Path(self.path).is_dir()


def find_checkpoint(source: str, revision: str | None = None) -> Checkpoint:
    """Resolves `model.source`: `builtin`, a folder with a config.json, or a hub id.

    Raises:
        ModelNotFoundError: the folder is not there or is not a model, or the source has no form of a hub id.
    """
    if source == BUILTIN:
        return Checkpoint(str(builtin_folder()), BUILTIN_NAME)
    folder = Path(source).expanduser()
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            raise ModelNotFoundError(
                f"model.source: {source!r} is a LoRA adapter (PEFT); adapters are not served by themselves. "
                "Merge it into its base (peft: merge_and_unload, then save_pretrained), and serve that folder"
            )
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(f"model.source: the folder {source!r} has no config.json")
        return Checkpoint(str(folder), folder.resolve().name)
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ModelNotFoundError(f"model.source: no folder {source!r}")
    return Checkpoint(source, source, revision)
