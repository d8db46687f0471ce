"""Tools as `/v1/chat/completions` names them."""

from collections.abc import Mapping, Sequence

from cluster.api.openai.tools.schema import (
    AllowedToolChoice,
    ChatTool,
    ChatToolChoice,
    FunctionDefinition,
    NamedToolChoice,
)
from cluster.api.openai.tools.use import Function, ParserName, ToolChoice, ToolUse, tool_use_of


def chat_tool_use(
    tools: Sequence[ChatTool] | None,
    choice: ChatToolChoice | None,
    *,
    is_parallel: bool | None,
    parser: ParserName,
    templates: Mapping[str, str],
) -> ToolUse | None:
    """As `tool_use_of`."""
    functions = [_function_of(tool.function) for tool in tools or ()]
    parallel = is_parallel is not False
    return tool_use_of(functions, _choice_of(choice, parallel), parser=parser, templates=templates)


def _function_of(tool: FunctionDefinition) -> Function:
    return Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        is_strict=bool(tool.strict),
    )


def _choice_of(choice: ChatToolChoice | None, is_parallel: bool) -> ToolChoice:
    match choice:
        case NamedToolChoice():
            return ToolChoice(mode="required", names=(choice.function.name,), is_parallel=False)
        case AllowedToolChoice(allowed_tools=allowed):
            names = tuple(tool.function.name for tool in allowed.tools)
            return ToolChoice(mode=allowed.mode, names=names, is_parallel=is_parallel)
        case None:
            return ToolChoice(is_parallel=is_parallel)
        case mode:
            return ToolChoice(mode=mode, is_parallel=is_parallel)
