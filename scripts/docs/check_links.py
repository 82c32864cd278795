"""Check that all links and images of the built site lead to files and anchors that it has.

    python scripts/docs/check_links.py site          # `make docs` does it after the build

Addresses of other hosts are not asked. `release.py` takes those of README.md that lead back into the tree from here.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Anchors of a page, and the addresses that it names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or tag == "a" and name == "name":
                self.anchors.add(value or "")
            elif name in ("href", "src"):
                self.addresses.append(value or "")


def of_site(site: Path) -> list[str]:
    """PAGE -> ADDRESS of each address that leads nowhere; one on another host is not asked."""
    site, faults = site.resolve(), []
    pages = {file.resolve(): Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    for file, page in pages.items():
        for address in page.addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or file.name == "404.html":  # its links begin with the site's own root
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or target in pages and unquote(parts.fragment) not in pages[target].anchors:
                faults.append(f"{file.relative_to(site)} -> {address}")
    return faults


def of_address(text: str, base: str, tree: Path) -> list[str]:
    """Links of a Markdown text that begin with the regular expression `base` and name no file of `tree`, and those
    that are relative."""
    links = re.findall(r"\]\(([^()\s]+)\)", text)
    inside = [(link, re.sub(f"^{base}", "", link).partition("#")[0]) for link in links if re.match(base, link)]
    return [link for link, path in inside if not (tree / path).exists()] + \
        [link for link in links if not re.match(r"[a-z]+:|#", link)]


def main() -> None:
    """Print what leads nowhere; exit code 1 if there is any."""
    site = Path(sys.argv[1])
    faults = of_site(site)
    print("\n".join(faults) or f"{sum(1 for _ in site.rglob('*.html'))} pages: all links and images are there")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
