"""Small tasks of lm-evaluation-harness, one of each kind of request, for tests: tests/data/lm_eval_tasks."""

from pathlib import Path

TASKS = Path(__file__).parent / "data" / "lm_eval_tasks"
NAMES = ("local_choices", "local_last_words", "local_passages", "local_questions")


def write_tasks(directory: Path) -> Path:
    """The YAML files with the absolute paths of their data, which the harness takes from the working directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in TASKS.glob("*.yaml"):
        text = file.read_text(encoding="utf-8").replace("HERE", str(TASKS))
        (directory / file.name).write_text(text, encoding="utf-8")
    return directory
