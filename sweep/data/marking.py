"""A chat template that marks the assistant's turns, made of one that does not.

TRL learns from assistant's turns alone only where the template marks them, and has marked ones of
its own for some models.
"""

from __future__ import annotations

from storage.files import WRITTEN_BY

# Tags with hyphens leave no spaces around them. The model's template is between two empty texts,
# as what stands beside a tag may lose its spaces and line ends.
_MARKED = """{#
# %(written_by)s: the model's own chat template, rendered up to each of the assistant's turns,
# so that these can be marked. What it renders is the same.
#}
{%%- macro rendered(messages, add_generation_prompt) -%%}
{{- '' }}%(template)s{{ '' -}}
{%%- endmacro -%%}
{%%- macro common_length(left, right) -%%}
  {%%- set common = namespace(length=0, is_over=false) -%%}
  {%%- for character in left -%%}
    {%%- if right[loop.index0:loop.index] != character -%%}
      {%%- set common.is_over = true -%%}
    {%%- endif -%%}
    {%%- if not common.is_over -%%}
      {%%- set common.length = loop.index -%%}
    {%%- endif -%%}
  {%%- endfor -%%}
  {{- common.length -}}
{%%- endmacro -%%}
{%%- set prompts = add_generation_prompt is defined and add_generation_prompt -%%}
{%%- set whole = rendered(messages, prompts) -%%}
{%%- set written = namespace(length=0) -%%}
{%%- for message in messages -%%}
  {%%- if message['role'] == 'assistant' -%%}
    {%%- set begin = -1 -%%}
    {%%- if loop.first and message['content'] is string -%%}
      {%%- set begin = whole.find(message['content']) -%%}
    {%%- elif not loop.first -%%}
      {%%- set before = rendered(messages[:loop.index0], false) -%%}
      {%%- set prompted = rendered(messages[:loop.index0], true) -%%}
      {%%- if whole.startswith(prompted) -%%}
        {%%- set begin = prompted | length -%%}
      {%%- elif whole.startswith(before) -%%}
        {%%- set rest = before | length -%%}
        {%%- set begin = rest + common_length(prompted[rest:], whole[rest:]) | int -%%}
      {%%- endif -%%}
    {%%- endif -%%}
    {%%- set through = rendered(messages[:loop.index], false) -%%}
    {%%- if loop.last and not prompts -%%}
      {%%- set through = whole -%%}
    {%%- endif -%%}
    {%%- set end = through | length -%%}
    {%%- if not whole.startswith(through) -%%}
      {%%- set end = common_length(through, whole) | int -%%}
    {%%- endif -%%}
    {%%- if 0 <= begin < end -%%}
      {{- whole[written.length:begin] -}}
      {%%- generation -%%}{{- whole[begin:end] -}}{%%- endgeneration -%%}
      {%%- set written.length = end -%%}
    {%%- endif -%%}
  {%%- endif -%%}
{%%- endfor -%%}
{{- whole[written.length:] -}}
"""


def marked(template: str) -> str:
    """Return a template that renders the same and marks the assistant's turns.

    A turn is marked from where the template's prompt for an answer ends to what closes it. One that
    is rendered otherwise once others follow is marked as far as it is rendered the same: a turn
    whose thoughts are then left out is not marked at all.

    Args:
        template: a chat template in Jinja, without marks.
    """
    # Jinja drops a line end at the end of a template.
    return _MARKED % {"written_by": WRITTEN_BY, "template": template.removesuffix("\n")}
