"""Empty stand-ins for packages that a process does not have, so that code which only names them can be imported.

For read_with_vllm.py and read_with_sglang.py: the compiled kernels of servers, and packages of their front ends.
Nothing of them computes a rotation, a window or a length on a CPU.
"""

import importlib.machinery
import sys
import types


class _Kind(type):
    def __call__(cls, *arguments, **options):
        # A decorator gives back what it decorates.
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not options else cls

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything

    def __getitem__(cls, _):
        return cls

    def __iter__(cls):
        return iter(())


class _Anything(metaclass=_Kind):
    """Whatever a stubbed module is asked for: a class, since some of it is used in annotations and isinstance."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class StubbedModules:
    """Imports every module of the named packages as an empty one; `used` has those that were asked for."""

    def __init__(self, *packages: str):
        self.packages, self.used = set(packages), set()
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package not in self.packages:
            return None
        self.used.add(package)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        module.__version__ = "3.0.0"
