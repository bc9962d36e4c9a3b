"""Models of the tests of texts."""

from tests.fakes.small_models import (  # noqa: F401 - fixtures
    chat_model,
    forgetful_template,
    load,
    model_folder,
    pytest_generate_tests,
    qwen,
    write_model,
)
