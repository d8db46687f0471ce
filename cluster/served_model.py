"""What clients rely on of a model beside its weights, and whether other weights could take over."""

from dataclasses import dataclass, fields
from pathlib import Path

from cluster.doctor.model_facts import model_facts
from cluster.errors import ModelError
from cluster.frontend.tokenizer_files import TokenizerDamaged, TokenizerNotFound, files_of
from cluster.generation import GenerationFileDamaged, read_generation
from cluster.models import HUB_NAME
from worker.errors import ModelError as UnreadableModel
from worker.models.spec import ModelSpec, read_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One checkpoint."""

    model_dir: Path
    spec: ModelSpec
    tokenizer_digest: str
    """Empty: it has none."""
    end_ids: tuple[int, ...]


def read_served_model(model_dir: Path, chat_template: str = "") -> ServedModel:
    """Read what a folder holds, and see whether its weight files are whole.

    Raises:
        ModelError: it cannot be served; the message says why.
    """
    try:
        if problem := model_facts(model_dir).problem:
            raise ModelError(problem)
        end_ids, _ = read_generation(model_dir)
        return ServedModel(
            model_dir=model_dir,
            spec=read_spec(model_dir),
            tokenizer_digest=_digest(model_dir, chat_template),
            end_ids=end_ids,
        )
    except (UnreadableModel, GenerationFileDamaged, TokenizerDamaged) as error:
        raise ModelError(str(error)) from error


def _digest(model_dir: Path, chat_template: str) -> str:
    try:
        return files_of(model_dir, chat_template=chat_template).digest
    except TokenizerNotFound:
        return ""


def why_not_instead(new: ServedModel, old: ServedModel) -> str:
    """Why requests of `old` could not go on with the weights of `new`; empty: they could."""
    differing = [
        f"{field.name} is {getattr(new.spec, field.name)}, not {getattr(old.spec, field.name)}"
        for field in fields(ModelSpec)
        if getattr(new.spec, field.name) != getattr(old.spec, field.name)
    ]
    if new.tokenizer_digest != old.tokenizer_digest:
        differing.append("its tokenizer or chat template is another one")
    if new.end_ids != old.end_ids:
        differing.append(f"its end tokens are {new.end_ids}, not {old.end_ids}")
    if not differing:
        return ""
    return (
        f"{new.model_dir} is no checkpoint of the model that is served: {'; '.join(differing)}. "
        "Only weights can be exchanged while a cluster serves; start another cluster for another "
        "model"
    )


class Checkpoints:
    """The one that is served, and others on the engine's host that could be instead."""

    def __init__(self, served: ServedModel, models_dir: Path, chat_template: str) -> None:
        self._served = served
        self._models_dir, self._chat_template = models_dir, chat_template

    def find(self, model: str, present: Path) -> ServedModel:
        """The checkpoint that a user means; empty: what is in the present folder now.

        Raises:
            ModelError: there is none, it is not whole, or requests could not go on with it.
                Nothing is fetched, since that would hold the engine up.
        """
        found = read_served_model(self._folder(model, present), self._chat_template)
        if why_not := why_not_instead(found, self._served):
            raise ModelError(why_not)
        return found

    def _folder(self, model: str, present: Path) -> Path:
        if not model:
            return present
        for folder in (self._models_dir / model, Path(model).expanduser()):
            if (folder / "config.json").is_file():
                return folder.resolve()
        how = (
            f"`stoker fetch {model}` brings one there, and prints its folder"
            if HUB_NAME.fullmatch(model)
            else "Name a folder with config.json and *.safetensors"
        )
        raise ModelError(f"there is no checkpoint in a folder {model} on the engine's host. {how}")
