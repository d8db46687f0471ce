"""Tools as `/v1/responses` names them."""

from collections.abc import Mapping, Sequence

from cluster.api.openai.responses_body import (
    ResponsesAllowedTools,
    ResponsesNamedTool,
    ResponsesTool,
    ResponsesToolChoice,
)
from cluster.api.openai.tools.use import Function, ParserName, ToolChoice, ToolUse, tool_use_of


def responses_tool_use(
    tools: Sequence[ResponsesTool] | None,
    choice: ResponsesToolChoice | None,
    *,
    is_parallel: bool | None,
    parser: ParserName,
    templates: Mapping[str, str],
) -> ToolUse | None:
    """As `tool_use_of`."""
    parallel = is_parallel is not False
    return tool_use_of(
        [_function_of(tool) for tool in tools or ()],
        _choice_of(choice, parallel),
        parser=parser,
        templates=templates,
    )


def _function_of(tool: ResponsesTool) -> Function:
    return Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        is_strict=bool(tool.strict),
    )


def _choice_of(choice: ResponsesToolChoice | None, is_parallel: bool) -> ToolChoice:
    match choice:
        case ResponsesNamedTool():
            return ToolChoice(mode="required", names=(choice.name,), is_parallel=False)
        case ResponsesAllowedTools():
            names = tuple(tool.name for tool in choice.tools)
            return ToolChoice(mode=choice.mode, names=names, is_parallel=is_parallel)
        case None:
            return ToolChoice(is_parallel=is_parallel)
        case mode:
            return ToolChoice(mode=mode, is_parallel=is_parallel)
