"""Publishing a policy: immutable, named, checksummed adapter versions in a directory, each with the probe by which an
engine proves that it samples from that version and no other.
"""

from tithe.weight_sync.directory import DirectoryChannel, load_published, manifest_fields, read_manifest
from tithe.weight_sync.manifest import MANIFEST_FILE, FileRecord, Manifest, published_name
from tithe.weight_sync.probe import Probe, ProbeCause, ProbeVerdict, compare_probe

__all__ = [
    "MANIFEST_FILE",
    "DirectoryChannel",
    "FileRecord",
    "Manifest",
    "Probe",
    "ProbeCause",
    "ProbeVerdict",
    "compare_probe",
    "load_published",
    "manifest_fields",
    "published_name",
    "read_manifest",
]
