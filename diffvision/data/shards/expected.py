"""Compare a local file with what its shard must hold: its manifest, else what was first read of it.

No samples are read here. `reader` opens the file and has it checked; `verify` computes and notes its sha256.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from diffvision.data.shards.cache import ShardCache
from diffvision.data.shards.index import ShardIndex, Version, scan
from diffvision.data.shards.sample import BadSample
from diffvision.data.shards.sources import Shard
from diffvision.data.shards.verify import sha256_of

RENAME = "rename the members, or pack the images anew with `diffvision data make folder`"
"""The remedy for names that are no keys."""
_END_BYTES = 1 << 16  # read at either end of a shard of which only a count is known, to distinguish it from others
_MISMATCH = "shard not as its manifest says"


class ExpectedShard:
    """What a shard must hold, and which versions of its file hold it.

    Args:
        shard: with what its manifest says.
        cache: compares remote and compressed shards with their manifest when they arrive.

    Attributes:
        shard: replaced by one with a pinned version once its server answers.
        digest: of the index that was first read, where no sha256 is known.
        content: (how the content is known, what it is), as of the start.
    """

    def __init__(self, shard: Shard, cache: ShardCache) -> None:
        self.shard, self._cache = shard, cache
        self.digest: str | None = None
        self._first = self._version_on_disk()
        self._verified: Version | None = None  # the version whose sha256 is the manifest's
        self.content = ("", "")

    @property
    def in_cache(self) -> bool:
        """Whether the shard is read from the cache rather than from its location."""
        return self._cache.keeps(self.shard)

    def set_content(self) -> None:
        """Record the content as it is known now."""
        self.content = self._content()

    def check(self, path: Path, version: Version, index: ShardIndex) -> None:
        """Check a version of the file and its index.

        Raises:
            BadSample: it is not what its manifest says; none of its samples can be used.
            ValueError: it holds more samples than it should, was damaged before its manifest was written, or was
                changed and has no manifest.
            OSError: it cannot be read.
        """
        if index.dotted:
            raise BadSample(f"shard of keys with dots ({RENAME})")
        shard = self.shard
        if self._first is None:
            self._first = version
        changed = version[:2] != self._first[:2]  # a copy may keep size and mtime
        counted = len(index) if shard.samples is None else shard.samples
        reason = self._mismatch(path, version, index, changed=changed)
        if len(index) > counted and not (reason and changed):
            raise ValueError(
                f"shard {shard.location} holds {len(index)} samples, its manifest or sizes.json says {counted}: write "
                "it anew with diffvision.data.make.write_manifest"
            )
        if reason:
            raise BadSample(reason)
        if shard.sha256 is not None and index.damage and not index.cut:
            raise ValueError(
                f"shard {shard.location} is damaged after {len(index)} samples, and was so when its manifest was "
                f"written: {index.damage}; fetch it again and write the manifest anew"
            )
        if not index.damage and len(index) < counted:
            raise BadSample(f"{_MISMATCH} (samples)")

    def unchanged(self, file: int | Path, version: Version) -> bool:
        """Return whether a file still is this version.

        Its ctime counts where the file can be compared with a manifest again; not in the cache, where each use of a
        file changes it, and not of an open file that was removed, for that changes it too.
        """
        now = Version.of(file)
        if now[:3] != version[:3]:
            return False
        if now == version or self.shard.sha256 is None or self.in_cache:
            return True
        return os.stat(file).st_nlink == 0

    def _mismatch(self, path: Path, version: Version, index: ShardIndex, *, changed: bool) -> str:
        """Return why the file is not the expected shard, or "" where it is."""
        shard = self.shard
        if self.in_cache:
            # The cache has compared it with its manifest; without one, its index must be the one first read.
            if self.digest not in (None, index.digest):
                raise self._changed()
        elif shard.sha256 is None:
            assert self._first is not None
            if changed or (version.inode != self._first.inode and not self._same_content(path)):
                raise self._changed()
            self._first = version
        elif self._verified != version:
            if version.size < (shard.bytes or 0):
                # A tar that was cut is used as far as it goes. One that is whole is another shard, and so may be one
                # that is being written now.
                return "" if index.cut and not changed else f"{_MISMATCH} (bytes)"
            if sha256_of(path, self._cache.progress) != shard.sha256:
                return f"{_MISMATCH} (sha256)"
            self._verified = version
        if shard.sha256 is None and self.digest is None:
            self.digest = index.digest
        return ""

    def _same_content(self, path: Path) -> bool:
        """Return whether another file of the same size and mtime holds what was first read, as far as that is known.

        Its headers are read, for the sidecar may be that of the first file.
        """
        if self.digest is not None:
            return scan(path).digest == self.digest
        return self._content() == self.content

    def _content(self) -> tuple[str, str]:
        shard = self.shard
        if shard.sha256 is not None:
            return "sha256", shard.sha256
        if self.digest is not None:
            return "members", self.digest
        if not shard.remote:
            with suppress(OSError), open(shard.location, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest = hashlib.sha256(str(size).encode())
                for begin in (0, max(0, size - _END_BYTES)):
                    file.seek(begin)
                    digest.update(file.read(_END_BYTES))
                return "ends", digest.hexdigest()
        if shard.bytes is not None:  # as its server said
            return "sizes", f"{shard.name} {shard.bytes}"
        return "names", shard.name

    def _version_on_disk(self) -> Version | None:
        if self.in_cache:
            return None
        try:
            return Version.of(self.shard.location)
        except OSError:
            return None  # the error is raised again where the shard is read

    def _changed(self) -> ValueError:
        return ValueError(
            f"shard {self.shard.location} was changed after it was first read, and no manifest says what it should "
            "hold: leave it alone during a run, or write a manifest (diffvision.data.make.write_manifest); then start "
            "the run again"
        )
