"""Our models in transformers' Auto classes, before either transformers or the models are imported.

transformers has no entry point for other packages' models, and `import relpos` must stay light. Its Auto classes are
lazy themselves: they hold tables of names, and import the module transformers.models.<model type> when a name is looked
up. So an import hook adds our names to the tables when the modules that hold the tables are imported, and provides
modules transformers.models.relpos_… that forward to relpos.models. Nothing is imported until a folder is opened.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from relpos.models.registry import FAMILIES, PREFIX

CLASSES = {f"{PREFIX}{name}": entry.classes for name, entry in FAMILIES.items()}  # by model type, for each Auto class
TABLES = {  # of the Auto classes of models
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
}

CONFIGURATION = "transformers.models.auto.configuration_auto"
MODELING = "transformers.models.auto.modeling_auto"


def name_configs(auto: ModuleType) -> None:
    """Write our model types into AutoConfig's table."""
    auto.CONFIG_MAPPING_NAMES.update({model_type: classes["AutoConfig"] for model_type, classes in CLASSES.items()})


def name_models(auto: ModuleType) -> None:
    """Write our models into the tables of the Auto classes."""
    for auto_class, table in TABLES.items():
        getattr(auto, table).update(
            {model_type: classes[auto_class] for model_type, classes in CLASSES.items() if auto_class in classes}
        )


def register_classes(auto: ModuleType) -> None:
    """Register our classes with Auto classes that are already imported, and have therefore read their tables."""
    models = importlib.import_module("relpos.models")
    for model_type, classes in CLASSES.items():
        config = getattr(models, classes["AutoConfig"])
        sys.modules[CONFIGURATION].AutoConfig.register(model_type, config, exist_ok=True)
        for auto_class in TABLES.keys() & classes.keys():
            getattr(auto, auto_class).register(config, getattr(models, classes[auto_class]), exist_ok=True)


class _CallAfter(Loader):
    """Wraps a module's own loader, and calls a function after the module has been executed."""

    def __init__(self, loader: Loader, act: Callable[[ModuleType], None]) -> None:
        self.loader, self.act = loader, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.act(module)


class _Forward(Loader):
    """Loads a module that forwards its attributes to relpos.models."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        models = importlib.import_module("relpos.models")
        vars(module)["__getattr__"] = lambda name: getattr(models, name)


class _Finder(MetaPathFinder):
    """Finds the forwarding modules, and wraps the loaders of the modules that hold the tables."""

    def __init__(self, awaited: dict[str, Callable[[ModuleType], None]]) -> None:
        self.awaited = awaited

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, last = fullname.rpartition(".")
        if package == "transformers.models" and last in CLASSES:
            return ModuleSpec(fullname, _Forward())
        act = self.awaited.pop(fullname, None)
        if act is None:
            return None
        spec = importlib.util.find_spec(fullname)  # by the other finders: this name is no longer awaited here
        if spec is not None and spec.loader is not None:
            spec.loader = _CallAfter(spec.loader, act)
        return spec


def register_when_imported() -> None:
    """Register our models now if transformers' Auto classes are imported; otherwise when they are imported."""
    if MODELING in sys.modules:
        register_classes(sys.modules[MODELING])
        return
    awaited: dict[str, Callable[[ModuleType], None]] = {CONFIGURATION: name_configs, MODELING: name_models}
    if CONFIGURATION in sys.modules:
        name_configs(sys.modules[CONFIGURATION])
        del awaited[CONFIGURATION]
    sys.meta_path.insert(0, _Finder(awaited))
