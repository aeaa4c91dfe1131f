"""What the package's metadata says of where the project lives: nothing, until it has an address."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

UNSET = ".example"
"""How an address ends that is nobody's (RFC 2606)."""


class ProjectAddress(MetadataHookInterface):
    """Write links from the one setting, `address` in pyproject.toml.

    Links of the README are relative, so that they work in a clone. In the package's description they are absolute;
    while there is no address they are plain text.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Add `urls` and `readme`."""
        address = self.config["address"].rstrip("/")
        known = not address.endswith(UNSET)
        metadata["urls"] = {"Paper": "https://arxiv.org/abs/2111.05968"}
        if known:
            metadata["urls"] |= {
                "Source": address,
                "Documentation": f"{address}/blob/main/docs/index.md",
                "Changelog": f"{address}/blob/main/CHANGELOG.md",
                "Issues": f"{address}/issues",
                "Security": f"{address}/security/advisories/new",
            }
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(
            r"!\[([^]]*)\]\((?!https?://)([^)]+)\)",
            rf"![\1]({address}/raw/main/\2)" if known else "",
            text,
        )
        link = rf"[\1]({address}/blob/main/\2)" if known else r"\1"
        text = re.sub(r"\[([^]]*)\]\((?!https?://|#)([^)]+)\)", link, text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
