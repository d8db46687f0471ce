"""Chat templates that know tools, in the manner of two families of models."""

HERMES = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n{% endif %}Tools:{% for tool in tools %}\n{{ tool | tojson }}"
    "{% endfor %}\nCall with <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if not (tools and loop.first and m.role == 'system') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<|python_tag|>"
    "{{ {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}"
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n{% endif %}"
)
