"""Tests in a real browser, which is Chromium driven by Playwright."""
