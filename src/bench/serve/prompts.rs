//! What is asked: made-up prompts of a wanted length, or those of a file.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use super::client::Client;
use super::random::Random;

/// Bytes of a file of prompts.
const FILE_MAX: u64 = 1 << 30;

/// A prompt, as it goes into the body.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    Tokens(Vec<u32>),
    Text(String),
}

impl Prompt {
    pub fn to_json(&self) -> Value {
        match self {
            Self::Tokens(tokens) => json!(tokens),
            Self::Text(text) => json!(text),
        }
    }
}

/// One request to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    pub prompt: Prompt,
    /// Prompt tokens, where they are known before the server counts them.
    pub input_len: Option<u32>,
    /// Tokens asked for.
    pub output_len: u32,
}

/// Lengths of made-up requests.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    pub prefix: u32,
    pub input: u32,
    pub output: u32,
    /// Lengths are drawn from so far below and above, as a share.
    pub range_ratio: f64,
}

/// Made-up prompts: token ids drawn from those of a text of many words, so that every id is one
/// that the model knows. All begin with the same `prefix` ids, and differ from there on.
pub async fn random(
    client: &Client,
    count: u32,
    lengths: Lengths,
    as_text: bool,
    random: &mut Random,
) -> anyhow::Result<Vec<Ask>> {
    let pool = client.tokenize(&vocabulary()).await.context(
        "made-up prompts need the server's /tokenize; without it use --dataset-name custom",
    )?;
    ensure!(!pool.is_empty(), "the server's /tokenize gave no tokens");
    let draw = |random: &mut Random, len: u32| -> Vec<u32> {
        (0..len).map(|_| pool[random.below(pool.len() as u64) as usize]).collect()
    };
    let prefix = draw(random, lengths.prefix);
    let mut asks = Vec::new();
    for _ in 0..count {
        let input = within(lengths.input, lengths.range_ratio, random);
        let output_len = within(lengths.output, lengths.range_ratio, random);
        let tokens = [prefix.clone(), draw(random, input)].concat();
        let input_len = Some(tokens.len() as u32);
        let (prompt, input_len) = match as_text {
            false => (Prompt::Tokens(tokens), input_len),
            // The template adds tokens of its own: the server's count is the right one.
            true => (Prompt::Text(client.detokenize(&tokens).await?), None),
        };
        asks.push(Ask { prompt, input_len, output_len });
    }
    Ok(asks)
}

/// A length around `len`, at least 1.
fn within(len: u32, ratio: f64, random: &mut Random) -> u32 {
    let spread = (f64::from(len) * ratio).floor() as u32;
    let low = len - spread.min(len);
    (low + random.below(u64::from(2 * spread) + 1) as u32).max(1)
}

/// Words, each once: syllables put together. Few enough for servers that take short texts only.
fn vocabulary() -> String {
    const FIRST: [&str; 8] = ["ba", "co", "di", "fe", "gu", "lo", "ri", "tu"];
    const SECOND: [&str; 12] =
        ["ber", "can", "den", "fit", "her", "ling", "mond", "ness", "port", "son", "ver", "well"];
    let words = FIRST.iter().flat_map(|first| SECOND.map(|second| format!("{first}{second}")));
    words.collect::<Vec<_>>().join(" ")
}

/// Prompts of a file of JSON lines with the field `prompt`, from the start again when there are
/// fewer than asked for.
pub fn custom(path: &Path, count: u32, output_len: u32) -> anyhow::Result<Vec<Ask>> {
    let named = || format!("--dataset-path {}", path.display());
    let size = std::fs::metadata(path).with_context(named)?.len();
    ensure!(size <= FILE_MAX, "{}: {size} bytes are more than {FILE_MAX}", named());
    let text = std::fs::read_to_string(path).with_context(named)?;
    let mut prompts = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let value: Value = serde_json::from_str(line)
            .with_context(|| format!("{}, line {} is not JSON", named(), index + 1))?;
        let Some(prompt) = value.get("prompt").and_then(Value::as_str) else {
            bail!("{}, line {} has no text in the field \"prompt\"", named(), index + 1);
        };
        prompts.push(prompt.to_owned());
    }
    ensure!(!prompts.is_empty(), "{} has no prompts", named());
    let ask =
        |prompt: &String| Ask { prompt: Prompt::Text(prompt.clone()), input_len: None, output_len };
    Ok(prompts.iter().cycle().take(count as usize).map(ask).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_stay_within_their_range() {
        let mut random = Random::new(1);
        let mut drawn: Vec<u32> = (0..2000).map(|_| within(100, 0.1, &mut random)).collect();
        drawn.sort_unstable();
        assert_eq!((drawn[0], drawn[1999]), (90, 110));
        assert!((0..50).all(|_| within(100, 0.0, &mut random) == 100));
        assert!((0..50).all(|_| (1..=2).contains(&within(1, 1.0, &mut random))));
    }

    #[test]
    fn a_file_of_prompts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("prompts.jsonl");
        let told = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let told = match custom(&path, 3, 7) {
                Ok(asks) => format!("{:?}", asks.iter().map(|a| &a.prompt).collect::<Vec<_>>()),
                Err(error) => format!("{error:#}"),
            };
            told.replace(&*path.to_string_lossy(), "FILE")
        };
        let told = [
            told("{\"prompt\": \"a\"}\n\n{\"prompt\": \"b\", \"more\": 1}\n"),
            told("{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n"),
            told("{\"prompt\": \"a\"}\nb\n"),
            told(""),
        ];
        insta::assert_snapshot!(told.join("\n"), @r#"
        [Text("a"), Text("b"), Text("a")]
        --dataset-path FILE, line 2 has no text in the field "prompt"
        --dataset-path FILE, line 2 is not JSON: expected value at line 1 column 1
        --dataset-path FILE has no prompts
        "#);
    }
}
