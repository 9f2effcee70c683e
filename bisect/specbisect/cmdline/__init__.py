"""Pasted llama.cpp command lines and bug reports: what they ask for, and what of it was understood."""

from specbisect.cmdline.given import Note
from specbisect.cmdline.issue import Report, Request, issue_file
from specbisect.cmdline.line import CommandLine, mapped, parse

__all__ = ["CommandLine", "Note", "Report", "Request", "issue_file", "mapped", "parse"]
