"""Prepare pages for MkDocs: links out of `docs`, generated parts, fence attributes.

On GitHub, pages link to source files by relative paths. The site shows these files as pages of its own, so that such
links work without the address of a repository. `mkdocs.yml` lists this module under `hooks`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, InclusionLevel

from website import fences, measurement_tables, reference_pages

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Documents outside `docs`, and the page of the site that shows each.
MIRRORED = {".github/CONTRIBUTING.md": "contributing.md"}
# Files that pages of the site link to under another name.
ALIASES = {"README.md": "index.md", "reports/report.png": "figures/report.png", **MIRRORED}
# Only the end of a link: its text may hold code spans.
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?P<after>\))")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".md": "markdown", ".json": "json", ".sh": "sh"}
_REMOTE_WORKER, _LOCAL_WORKER = "https://unpkg.com/iframe-worker/shim", "stylesheets/worker_on_disk.js"
_LARGEST_FILE = 200_000  # bytes shown of one file; measured tables are larger, and nobody reads them as a page


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add mirrored documents, the page of the survey, a picture, and a page for each source file that is linked."""
    linked: set[str] = set()
    for source, uri in MIRRORED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        linked |= set(_find_source_links(text, source))
        files.append(File.generated(config, uri, content=rewrite_links(text, source, uri)))
    files.append(File.generated(config, "figures/report.png", abs_src_path=str(ROOT / "reports/report.png")))
    files.append(
        File.generated(config, measurement_tables.SURVEY_PAGE, content=measurement_tables.render_survey_page())
    )
    for file in list(files.documentation_pages()):
        source = _find_source(file.src_uri)
        linked |= set(_find_source_links(file.content_string, source))
    shown = _follow_documents(linked)
    for path in sorted(shown):
        files.append(
            File.generated(
                config,
                _name_source_page(path),
                content=_format_source_page(path, shown),
                inclusion=InclusionLevel.NOT_IN_NAV,
            )
        )
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the generated parts of a page, and make its links work on the site."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    markdown = reference_pages.fill_in(markdown)
    if uri not in MIRRORED.values():
        markdown = rewrite_links(markdown, _find_source(uri), uri)
    return _unescape_pipes(fences.drop_attributes(markdown))


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Mend what axe-core finds in the theme's pages."""
    # Nested lists of the navigation are part of its landmark, and no landmarks of their own.
    output = re.sub(r'(<nav class="md-nav" data-md-level="[1-9]") aria-labelledby="\w+"', r'\1 role="none"', output)
    output = re.sub(r'(<nav class="md-nav" data-md-level="[1-9]" role="none") aria-expanded="\w+"', r"\1", output)
    # Read from a disk, the theme searches by a script that it loads from another site.
    output = output.replace(
        _REMOTE_WORKER, posixpath.relpath(_LOCAL_WORKER, posixpath.dirname(page.file.dest_uri) or ".")
    )
    dialog = 'data-md-component="search" role="dialog"'
    output = output.replace(dialog, f'{dialog} aria-label="Search"')
    # A code block that scrolls must be reachable by keyboard.
    return output.replace("<pre><span></span><code>", '<pre tabindex="0"><span></span><code>')


def rewrite_links(page: str, source: str, uri: str) -> str:
    """Rewrite a page's relative links, so that they lead to pages of the site.

    Args:
      page: the Markdown text.
      source: the page's path in the repository, for example `docs/checks.md`.
      uri: the page's path on the site, for example `checks.md`.
    """

    def rewrite(match: re.Match[str]) -> str:
        target = match["target"]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        page_uri = ALIASES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if page_uri is None:
            if not (ROOT / path).exists():
                return match[0]  # `--strict` reports it
            page_uri = _name_source_page(path)
        relative = posixpath.relpath(page_uri, posixpath.dirname(uri) or ".")
        return f"{match['before']}{relative}{match['anchor'] or ''}{match['after']}"

    return "".join(text if is_code else _LINK.sub(rewrite, text) for is_code, text in fences.split_at_code(page))


def _unescape_pipes(page: str) -> str:
    """Write `|` for `\\|` in code spans: GitHub needs the backslash in tables, and Python-Markdown would show it."""
    return "".join(
        text.replace(r"\|", "|") if is_code and not text.lstrip().startswith("```") else text
        for is_code, text in fences.split_at_code(page)
    )


def _find_source_links(page: str, source: str) -> Iterator[str]:
    """Yield the repository paths outside `docs` that a page links to; of a folder, its Python files too."""
    for is_code, text in fences.split_at_code(page):
        for match in () if is_code else _LINK.finditer(text):
            if "://" in match["target"] or match["target"].startswith("mailto:"):
                continue
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["target"]))
            if path.startswith(("docs/", "..", "source/")) or path in ALIASES or not (ROOT / path).exists():
                continue
            yield path
            if (ROOT / path).is_dir():
                yield from (str(file.relative_to(ROOT)) for file in sorted((ROOT / path).glob("*.py")))


def _follow_documents(linked: set[str]) -> set[str]:
    """Return the source files that pages link to, and those that documents among them link to in turn."""
    shown: set[str] = set()
    while linked:
        shown |= linked
        documents = filter(None, map(_find_document, sorted(linked)))
        linked = {link for document in documents for link in _find_source_links(_read(document), document)} - shown
    return shown


def _find_document(path: str) -> str | None:
    """Return the Markdown file that the page of a source path shows: the file itself, or the README of a folder."""
    document = path if path.endswith(".md") else f"{path}/README.md"
    return document if (ROOT / document).is_file() else None


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _find_source(uri: str) -> str:
    """Return the repository path of a page of the site."""
    return next((source for source, page in MIRRORED.items() if page == uri), f"docs/{uri}")


def _name_source_page(path: str) -> str:
    return f"source/{path}.md"


def _format_source_page(path: str, shown: set[str]) -> str:
    """Show a Markdown file as a page, any other as a code block, and a folder as its README and a list of its files."""
    file = ROOT / path
    lines = [f"---\ntitle: {path}\nsearch:\n  exclude: true\n---", f"# `{path}`"]
    if document := _find_document(path):
        text = rewrite_links(_read(document), document, _name_source_page(path))
        lines.append(_unescape_pipes(fences.drop_attributes(_demote_headings(text))))
    if file.is_dir():
        for name in sorted(entry for entry in shown if posixpath.dirname(entry) == path):
            link = posixpath.relpath(_name_source_page(name), posixpath.dirname(_name_source_page(path)))
            lines.append(f"- [`{posixpath.basename(name)}`]({link}){_summarize_module(ROOT / name)}")
    elif not document:
        text = _read(path)[:_LARGEST_FILE]
        lines.append(f"`````{_LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n`````")
    return "\n\n".join(lines) + "\n"


def _demote_headings(text: str) -> str:
    return "".join(
        part if is_code else re.sub(r"^#", "##", part, flags=re.MULTILINE)
        for is_code, part in fences.split_at_code(text)
    )


def _summarize_module(file: Path) -> str:
    match = re.match(r'"""(.*?)(?:"""|\n)', file.read_text(encoding="utf-8"))
    return f": {match[1]}" if match else ""
