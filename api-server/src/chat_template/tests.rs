use super::*;
use pawl_shared::clock::ManualClock;
use serde_json::json;

fn context() -> TemplateContext {
    // 14 March 2026, 15:09:26 UTC.
    let clock = Arc::new(AtTime(1_773_500_966.0));
    TemplateContext { bos_token: "<s>".into(), eos_token: "</s>".into(), clock }
}

struct AtTime(f64);

impl Clock for AtTime {
    fn now(&self) -> pawl_shared::clock::Stamp {
        ManualClock::at(1).now()
    }

    fn wall(&self) -> pawl_shared::clock::WallTime {
        pawl_shared::clock::WallTime(self.0)
    }
}

fn conversation(messages: serde_json::Value) -> Conversation {
    Conversation {
        messages: messages.as_array().unwrap().clone(),
        add_generation_prompt: true,
        ..Conversation::default()
    }
}

fn render(source: &str, conversation: &Conversation) -> String {
    let template = ChatTemplate::parse(source, context());
    match template.and_then(|template| template.render(conversation, 100_000)) {
        Ok(text) => text,
        Err(error) => format!("{}: {error}", error.code.as_str()),
    }
}

/// Every shape of conversation through one template.
fn check(name: &str, source: &str) {
    let user = json!({"role": "user", "content": "Hi <b>\"you\"</b>"});
    let assistant = json!({"role": "assistant", "content": " Hello. "});
    let system = json!({"role": "system", "content": "Be brief."});
    let parts = json!({"role": "user", "content": [
        {"type": "text", "text": "one"}, {"type": "text", "text": "two"},
    ]});
    let call = json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": "abcdefghi", "type": "function",
         "function": {"name": "weather", "arguments": {"city": "Ulm"}}},
    ]});
    let result =
        json!({"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "rain"});
    let cases = [
        ("one user turn", json!([user])),
        ("system first", json!([system, user])),
        ("system, two rounds", json!([system, user, assistant, user])),
        ("two user turns in a row", json!([user, user])),
        ("empty content", json!([{"role": "user", "content": ""}])),
        ("content in parts", json!([parts])),
        ("a tool's turn", json!([user, call, result])),
    ];
    let mut shown = String::new();
    for (case, messages) in cases {
        shown += &format!("--- {case}\n{}\n", render(source, &conversation(messages)));
    }
    insta::assert_snapshot!(name, shown);
}

/// As SmolLM2's: a system message of its own where there is none.
const CHATML: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != \
    'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by \
    Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + \
    message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ \
    '<|im_start|>assistant\n' }}{% endif %}";

#[test]
fn chatml() {
    check("chatml", CHATML);
}

#[test]
fn header_ids_with_a_date_and_tools() {
    check("header_ids", include_str!("tests/header_ids.jinja"));
}

#[test]
fn inst_brackets_that_insist_on_alternation() {
    check("inst_brackets", include_str!("tests/inst_brackets.jinja"));
}

#[test]
fn turns_without_system_role() {
    check("turns", include_str!("tests/turns.jinja"));
}

#[test]
fn role_tags() {
    check("role_tags", include_str!("tests/role_tags.jinja"));
}

#[test]
fn thinking_with_generation_marks_and_macros() {
    check("thinking", include_str!("tests/thinking.jinja"));
}

#[test]
fn parts_only() {
    check(
        "parts_only",
        "{% for m in messages %}[{{ m.role }}]{% for part in m['content'] %}({{ part.text | trim \
         }}){% endfor %}{% endfor %}",
    );
}

#[test]
fn tools_go_where_the_template_has_a_place() {
    let tool = json!({"type": "function", "function": {"name": "f", "description": "<é> & so"}});
    let with_tools = Conversation {
        tools: vec![tool],
        ..conversation(json!([{"role": "user", "content": "Hi"}]))
    };
    insta::assert_snapshot!(render(CHATML, &with_tools));
    let json_filter = "{% if tools %}{{ tools | tojson }}|{{ tools[0] | tojson(indent=2) }}|\
                       {{ tools[0].function.description | tojson(ensure_ascii=True) }}{% endif %}";
    insta::assert_snapshot!(render(json_filter, &with_tools), @r#"
    [{"type": "function", "function": {"name": "f", "description": "<é> & so"}}]|{
      "type": "function",
      "function": {
        "name": "f",
        "description": "<é> & so"
      }
    }|"<\u00e9> & so"
    "#);
}

#[test]
fn going_on_with_the_last_message() {
    let open = |content: &str| {
        let conversation = Conversation {
            add_generation_prompt: false,
            continue_final_message: true,
            ..conversation(json!([
                {"role": "user", "content": "Hi"}, {"role": "assistant", "content": content},
            ]))
        };
        let trimming = CHATML.replace("message['content']", "message['content'] | trim");
        (render(CHATML, &conversation), render(&trimming, &conversation))
    };
    insta::assert_debug_snapshot!([open("Well, "), open("Hi"), open("")]);
}

#[test]
fn methods_and_functions_of_python() {
    let source = "{{ ' x,y '.strip().split(',')[-1] }} {{ 'abc'.startswith('ab') }} \
        {{ 'a</think>b'.split('</think>')[-1].lstrip('\\n') }} {{ {'a': 1}.get('b', 2) }} \
        {% for k, v in {'k': 'v'}.items() %}{{ k }}={{ v }}{% endfor %} \
        {{ 'Title case'.title() }} {{ 'a' in 'abc' }} {{ messages[::-1][0].role }} \
        {{ messages | length }} {{ none }} {{ undefined_thing }}|\
        {{ strftime_now('%d %b %Y, %-d.%-m.%y %H:%M:%S %A %j %p %%') }} {{ custom }}";
    let mut conversation = conversation(json!([{"role": "user", "content": "Hi"}]));
    conversation.template_kwargs.insert("custom".into(), json!({"a": [1, true, null, 1.5]}));
    insta::assert_snapshot!(render(source, &conversation));
}

#[test]
fn dates() {
    let at = |days: u64| functions::strftime("%F %a %j", days as f64 * 86_400.0 + 1.0).unwrap();
    let days = [0, 58, 59, 364, 365, 789, 790, 11_016, 11_017, 20_526, 47_540, 47_541];
    insta::assert_debug_snapshot!(days.map(at));
    assert_eq!(functions::strftime("%Q", 0.0), None);
}

#[test]
fn a_template_that_does_not_parse_says_where() {
    let hi = conversation(json!([{"role": "user", "content": "Hi"}]));
    insta::assert_snapshot!(render("{% for m in messages %}\n{{ m. }}{% endfor %}", &hi));
}

#[test]
fn bombs_run_out_of_fuel() {
    let hi = conversation(json!([{"role": "user", "content": "Hi"}]));
    let loops = "{% for a in range(10000) %}{% for b in range(10000) %}{% for c in range(10000) \
                 %}{% endfor %}{% endfor %}{% endfor %}";
    let doubling = "{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(40) %}\
                    {% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}";
    let output = "{% for a in range(100000) %}xxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}";
    let endless = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    // Of this thread: a busy machine must not look like a bomb.
    let spent = || {
        let spent = nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID);
        std::time::Duration::from(spent.unwrap()).as_secs_f64()
    };
    for bomb in [loops, doubling, output, endless, "{{ 'x' * 10000000000 }}"] {
        let started = spent();
        let template = ChatTemplate::parse_untrusted(bomb, context()).unwrap();
        let error = template.render(&hi, 100_000).unwrap_err();
        assert!(spent() - started < 1.0, "{bomb} took {} s", spent() - started);
        assert_eq!(error.code.status(), 400, "{bomb}: {error}");
    }
}
