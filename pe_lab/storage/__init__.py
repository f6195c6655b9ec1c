"""Files and directories: atomic writes, readers of JSON and JSON lines, paths of a command line."""

from pe_lab.storage.files import local_path, new_directory, unfinished, write_file, write_files
from pe_lab.storage.json_files import (
    json_object,
    read_json,
    read_records,
    salvage_json,
    salvage_records,
    set_aside,
    write_json,
    write_records,
)
