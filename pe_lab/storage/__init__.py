"""Files and directories, local and on object stores: atomic writes, JSON and JSON lines, logs, copies."""

from pe_lab.storage.directories import check_checkpoints, check_place, local_copy, new_directory, unfinished
from pe_lab.storage.files import create_file, new_file, replace_file, write_file, write_files
from pe_lab.storage.inputs import InputFile, find_files, local_matches, open_file
from pe_lab.storage.json_files import (
    json_object,
    json_objects,
    read_json,
    read_records,
    salvage_records,
    write_json,
    write_records,
)
from pe_lab.storage.leases import LeaseTaken, lease, lease_is_live, owner_lives
from pe_lab.storage.logs import AppendedLog, log_exists, read_log
from pe_lab.storage.paths import (
    AnyPath,
    absolute,
    at_home,
    children,
    exists,
    is_file,
    is_remote,
    kvstore,
    listing,
    move_tree,
    path,
    read_bytes,
    remove,
    remove_tree,
    s3_driver,
)
